"""Opening paths that others chose: with openat2(2) the kernel keeps each step inside a root, whatever links say."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from dsec.kernel.syscalls import syscall

__all__ = ["BENEATH", "IN_ROOT", "NO_LINKS", "folder_open", "is_there", "open_in"]

_NO_MAGICLINKS: Final = 0x02
NO_LINKS: Final = 0x04
"""Refuse every symbolic link (ELOOP)."""
BENEATH: Final = 0x08
"""Refuse what leads out (EXDEV)."""
IN_ROOT: Final = 0x10
"""Take the root folder for `/`: absolute links and `..` stay inside."""

_EAGAIN: Final = 11
_ATTEMPTS: Final = 100
_PATH_BYTES: Final = 4095
"""Of one path that a call takes."""


def open_in(root: int, path: str | bytes, flags: int, *, mode: int = 0, resolve: int = IN_ROOT) -> int:
    """Open `path` below the folder `root` (a descriptor). Magic links are always refused; close-on-exec is always set."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve | _NO_MAGICLINKS)
    for attempt in range(_ATTEMPTS):
        try:
            return syscall("openat2", root, os.fsencode(path), how, len(how), path=os.fsdecode(path))
        except OSError as error:
            # a rename or mount somewhere meanwhile: the kernel could not prove that `..` stayed inside
            if error.errno != _EAGAIN or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def folder_open(path: Path) -> Iterator[int]:
    """A descriptor to resolve paths from."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def is_there(root: int, parts: Sequence[bytes]) -> bool:
    """Whether that path, below the folder `root`, is there by folders alone, as overlayfs finds it in a layer: no link is followed."""
    *folders, name = parts
    fd = os.dup(root)
    try:
        while folders:
            # as many at once as one call takes
            taken = max(1, min(len(folders), _PATH_BYTES // 256))
            deeper = open_in(fd, b"/".join(folders[:taken]), os.O_PATH | os.O_DIRECTORY, resolve=NO_LINKS | BENEATH)
            os.close(fd)
            fd, folders = deeper, folders[taken:]
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
            return False
        raise
    finally:
        os.close(fd)
    return True
