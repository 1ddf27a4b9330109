"""The raw system call gate. Numbers from 424 on are the same on every architecture that we run on."""

from __future__ import annotations

import ctypes
import os
from typing import Final

__all__ = ["NUMBERS", "fail", "ioctl", "syscall"]

NUMBERS: Final[dict[str, int]] = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "openat2": 437,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "cachestat": 451,
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


def fail(what: str, error: int, path: str | os.PathLike[str] | None = None, *, detail: str = "") -> OSError:
    """The OSError for a failed call: `what` is the call and its gist, `detail` what the kernel's own log added."""
    text = f"{what}: {os.strerror(error)}" + (f" ({detail})" if detail else "")
    return OSError(error, text) if path is None else OSError(error, text, os.fspath(path))


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None, path: str | os.PathLike[str] | None = None) -> int:
    """Call by name. Numbers go as 64 bit, bytes as a NUL-ended pointer, None as NULL. EINTR is tried again."""
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    while True:
        result = int(_libc.syscall(ctypes.c_long(NUMBERS[name]), *converted))
        if result >= 0:
            return result
        error = ctypes.get_errno()
        if error != 4:  # EINTR
            raise fail(name, error, path)


def ioctl(fd: int, request: int, argument: ctypes.Array[ctypes.c_char]) -> None:
    """ioctl(2) with a buffer of any size, other threads running meanwhile. EINTR is not tried again."""
    if _libc.ioctl(fd, ctypes.c_ulong(request), argument) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def umount2(path: str | os.PathLike[str], flags: int) -> None:
    """umount2(2); see `mounts.unmount` for the one to use."""
    if _libc.umount2(os.fsencode(path), flags) != 0:
        raise fail("umount2", ctypes.get_errno(), path)
