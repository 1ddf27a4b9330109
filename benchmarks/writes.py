"""Bytes that a way of starting sandboxes writes to the node's disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["HOW", "device_written_bytes", "written_bytes"]

HOW = (
    "bytes that processes of it made dirty on disks (write_bytes of /proc/PID/io, with children that they waited for) and that reached "
    "loop devices of its own, which counts some twice; device_written_mb is what the whole machine wrote meanwhile, others' writes too"
)
SECTOR = 512


def _process_written(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                return int(line.split()[1])
    return 0


def _sectors_written(device: Path) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int((device / "stat").read_text().split()[6])
    return 0


def written_bytes(pids: Iterable[int], folder: Path | None = None) -> int:
    """So far, by these processes and by loop devices whose file lies below `folder`."""
    total = sum(map(_process_written, pids))
    if folder is not None:
        for loop in Path("/sys/block").glob("loop*"):
            with contextlib.suppress(OSError):
                if (loop / "loop/backing_file").read_text().startswith(f"{folder}/"):
                    total += _sectors_written(loop) * SECTOR
    return total


def device_written_bytes(folder: Path) -> int:
    """So far, by anybody, to the device that `folder` is on; 0 where that is no block device."""
    number = os.stat(folder).st_dev
    return _sectors_written(Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")) * SECTOR
