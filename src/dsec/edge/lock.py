"""One edge a run folder: the lock on its pid file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from libdsec.errors import Conflict

__all__ = ["PidFile"]


class PidFile:
    """Holds an exclusive flock on `path` for as long as it is open; the kernel drops it when the process dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self) -> None:
        """Lock and write the pid; Conflict where another process holds it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip()
            os.close(fd)
            raise Conflict(f"another edge (pid {holder or 'unknown'}) uses {self.path.parent}", field="run", cause="locked") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Unlock. The file stays: removing it would let two processes lock two files of one name."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1
