"""Bytes that a way of starting sandboxes writes to the node's disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HOW", "Written", "device_written_bytes", "written"]

HOW = (
    "written_mb: bytes that its processes made dirty on disks (write_bytes of /proc/PID/io, with children that they waited for) and bytes "
    "that reached loop devices of its own; the two overlap: ours are the sum, a peer's the larger. device_written_mb: what the whole "
    "machine wrote meanwhile, others too"
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


@dataclass(frozen=True, slots=True)
class Written:
    """Two readings of the same that overlap: what goes through a file system on a loop device is in both."""

    by_processes: int = 0
    to_loops: int = 0

    def since(self, before: Written) -> Written:
        """The difference."""
        return Written(self.by_processes - before.by_processes, self.to_loops - before.to_loops)

    def plus(self, more: Written) -> Written:
        """The sum."""
        return Written(self.by_processes + more.by_processes, self.to_loops + more.to_loops)

    @property
    def most(self) -> int:
        """No more than that was written."""
        return self.by_processes + self.to_loops

    @property
    def least(self) -> int:
        """No less than that was written."""
        return max(self.by_processes, self.to_loops)


def written(pids: Iterable[int], folder: Path | None = None) -> Written:
    """So far, by these processes and to loop devices whose file lies below `folder`."""
    loops = 0
    for loop in Path("/sys/block").glob("loop*") if folder is not None else ():
        with contextlib.suppress(OSError):
            if (loop / "loop/backing_file").read_text().startswith(f"{folder}/"):
                loops += _sectors_written(loop) * SECTOR
    return Written(sum(map(_process_written, pids)), loops)


def device_written_bytes(folder: Path) -> int:
    """So far, by anybody, to the device that `folder` is on; 0 where that is no block device."""
    number = os.stat(folder).st_dev
    return _sectors_written(Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")) * SECTOR
