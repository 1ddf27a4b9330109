"""Whether a process that works on a store still gets somewhere, as the kernel tells it: nothing in the work itself has to count."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["LifeSigns"]


class LifeSigns:
    """Of the process `pid`, all threads but those in `besides`. No call here waits for what the process waits for."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self.besides: Collection[int] = ()
        self._turns: dict[str, str] = {}
        self._bytes: dict[str, str] = {}

    def look(self) -> tuple[bool, bool]:
        """Since the last look: has a thread run, begun or ended, or does one want to run; has one read or written bytes.

        A thread that hangs in a file system does not run. But who waits for NFS is woken now and then to ask once more: that alone is not
        getting anywhere, and of bytes only those count whose read or write has ended.
        """
        turns, moved, ready = {}, {}, False
        for task in self._names():
            turns[task] = self._read(task, "schedstat") or self._read(task, "status")
            moved[task] = self._read(task, "io")
            # on a busy host it may want to for long
            ready = ready or self._read(task, "stat").rpartition(")")[2].startswith(" R")
        ran, read = ready or turns != self._turns, moved != self._bytes
        self._turns, self._bytes = turns, moved
        return ran, read

    def has_children(self) -> bool:
        """Whether it runs tools, for which it may wait as well as for the store."""
        return any(self._read(task, "children") for task in self._names())

    def _names(self) -> list[str]:
        with contextlib.suppress(OSError):
            return [name for name in os.listdir(self._tasks) if int(name) not in self.besides]
        return []

    def _read(self, task: str, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self._tasks / task / name).read_text()
        return ""
