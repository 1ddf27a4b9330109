"""What a command costs: time, CPU, memory of all its processes, bytes written."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.host import descendants
from benchmarks.writes import written

__all__ = ["HOW", "Charge", "charged"]

HOW = (
    "wall_s is the command's, synced_s until all it wrote was on the disk; peak_rss_mb the largest sum of its processes' resident memory, "
    "looked at every 50 ms; written_mb what its processes made dirty on disks"
)
MB = 1e6
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Charge:
    """One command that ended well. `stdout` is what it said."""

    wall_s: float
    synced_s: float
    cpu_s: float
    peak_rss_bytes: int
    written_bytes: int
    stdout: str

    def to_json(self) -> dict[str, Any]:
        """Rounded; MB are 10^6 bytes."""
        return {
            "wall_s": round(self.wall_s, 2),
            "synced_s": round(self.synced_s, 2),
            "cpu_s": round(self.cpu_s, 2),
            "peak_rss_mb": round(self.peak_rss_bytes / MB, 1),
            "written_mb": round(self.written_bytes / MB, 1),
        }


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def charged(argv: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, timeout: float = 1800) -> Charge:
    """Run to the end; `folder` is on the file system that it writes to. RuntimeError with what it said if it fails.

    No other child of this process may run meanwhile: CPU and writes are those of all children that have ended.
    """
    os.sync()
    cpu, before = _children_cpu(), written([os.getpid()])
    peak = 0
    over = threading.Event()
    started = time.perf_counter()
    process = subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | dict(env or {})
    )

    def look() -> None:
        nonlocal peak
        while not over.wait(_LOOK_SECONDS):
            peak = max(peak, sum(map(_resident, descendants([process.pid]))))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        wall = time.perf_counter() - started
    finally:
        over.set()
        watcher.join()
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {process.returncode}: {stderr[-400:]}")
    wrote = written([os.getpid()]).since(before).least
    cpu = _children_cpu() - cpu
    subprocess.run(["sync", "-f", str(folder)], check=True)
    return Charge(wall, time.perf_counter() - started, cpu, peak, wrote, stdout)
