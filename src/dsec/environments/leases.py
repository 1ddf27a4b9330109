"""Temporary folders with an owner that the kernel knows: a lock file is held as long as the folder is in use, by whatever process.

A process that dies lets go of the lock, and the next sweep removes what it left. That needs neither pids, which are used again, nor clocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LeasedFolders"]

_SUFFIX = ".lock"


class LeasedFolders:
    """Temporary folders below `root`; any number of processes may share it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _lock(self, path: Path) -> int | None:
        """Take the lock without waiting; None if somebody has it, or a sweep has unlinked it in between."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 0:
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    @contextlib.contextmanager
    def lease(self) -> Iterator[Path]:
        """A new, empty folder that is removed at the end."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            folder = self.root / secrets.token_hex(8)
            lock = folder.with_name(folder.name + _SUFFIX)
            if (fd := self._lock(lock)) is not None:
                break
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            try:
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    lock.unlink(missing_ok=True)
            finally:
                os.close(fd)

    def sweep(self) -> list[str]:
        """Remove the folders that nobody holds; returns their names."""
        removed: list[str] = []
        if not self.root.is_dir():
            return removed
        for lock in sorted(self.root.glob("*" + _SUFFIX)):
            if (fd := self._lock(lock)) is None:
                continue
            try:
                folder = lock.with_name(lock.name.removesuffix(_SUFFIX))
                if folder.exists():
                    shutil.rmtree(folder)
                    removed.append(folder.name)
                lock.unlink(missing_ok=True)
            finally:
                os.close(fd)
        return removed
