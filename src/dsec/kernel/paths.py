"""Opening paths that others chose: with openat2(2) the kernel keeps each step inside a root, whatever links say."""

from __future__ import annotations

import os
import struct
from typing import Final

from dsec.kernel.syscalls import syscall

__all__ = ["BENEATH", "IN_ROOT", "NO_LINKS", "open_in"]

_NO_MAGICLINKS: Final = 0x02
NO_LINKS: Final = 0x04
"""Refuse every symbolic link (ELOOP)."""
BENEATH: Final = 0x08
"""Refuse what leads out (EXDEV)."""
IN_ROOT: Final = 0x10
"""Take the root folder for `/`: absolute links and `..` stay inside."""

_EAGAIN: Final = 11
_ATTEMPTS: Final = 100


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
