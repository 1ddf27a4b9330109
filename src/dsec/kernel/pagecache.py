"""What of a file is in the page cache."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable

from dsec.kernel.syscalls import syscall

__all__ = ["cached_pages"]

_RANGE = struct.Struct("=QQ")
_PAGES_AND_MORE = 5 * 8


def cached_pages(fd: int, ranges: Iterable[tuple[int, int]]) -> int | None:
    """Pages of the file's (offset, length) ranges that are in memory; None where the kernel (before 6.5) or the file system cannot say."""
    found = ctypes.create_string_buffer(_PAGES_AND_MORE)
    total = 0
    for offset, length in ranges:
        try:
            syscall("cachestat", fd, _RANGE.pack(offset, length), found, 0)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                return None
            raise
        total += struct.unpack_from("=Q", found)[0]
    return total
