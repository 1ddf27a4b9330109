"""Loop devices: a file as a block device."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.kernel.syscalls import fail

__all__ = ["attached_loop", "backing_file", "held_loop", "loop_devices_of"]

_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_READ_ONLY: Final = 1
_AUTOCLEAR: Final = 4
_DIRECT_IO: Final = 16

_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 8Q")
"""struct loop_config: fd, block_size, then struct loop_info64, then reserved."""


def pack_config(fd: int, flags: int, name: bytes) -> bytes:
    """A struct loop_config for the whole of a file."""
    return _CONFIG.pack(fd, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, name[:63], b"", b"", 0, 0, *[0] * 8)


@contextlib.contextmanager
def attached_loop(file: Path, *, direct_io: bool = True, read_only: bool = False) -> Iterator[Path]:
    """A loop device over `file`, as long as the context or a mount made in it needs it.

    The kernel detaches it when its last user is gone (LO_FLAGS_AUTOCLEAR): a crash cannot leave it behind. With `direct_io` pages are not
    kept twice in memory; where the file's system has none, it is done without.
    """
    flags = _AUTOCLEAR | (_DIRECT_IO if direct_io else 0) | (_READ_ONLY if read_only else 0)
    backing = os.open(file, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
    try:
        device, fd = _attach(backing, os.fsencode(file), flags)
    finally:
        os.close(backing)
    try:
        yield device
    finally:
        os.close(fd)


@contextlib.contextmanager
def held_loop(file: Path) -> Iterator[Path | None]:
    """A loop device that is attached to `file` already, which stays so within the context; None if there is none."""
    for device in loop_devices_of(file):
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            if backing_file(str(device)) == Path(os.path.realpath(file)):  # else it was detached before we had it open
                yield device
                return
        finally:
            os.close(fd)
    yield None


def _attach(backing: int, name: bytes, flags: int) -> tuple[Path, int]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            try:
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            except OSError as error:
                raise fail("ioctl(LOOP_CTL_GET_FREE)", error.errno or 0, "/dev/loop-control") from None
            device = Path(f"/dev/loop{number}")
            fd = os.open(device, (os.O_RDONLY if flags & _READ_ONLY else os.O_RDWR) | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, pack_config(backing, flags, name))
            except OSError as error:
                os.close(fd)
                if error.errno == errno.EBUSY:  # somebody else was given the same free number
                    continue
                if error.errno == errno.EINVAL and flags & _DIRECT_IO:
                    flags &= ~_DIRECT_IO
                    continue
                raise fail("ioctl(LOOP_CONFIGURE)", error.errno or 0, device) from None
            return device, fd
    finally:
        os.close(control)


def backing_file(device: str) -> Path | None:
    """The file behind a loop device, by the device's path; None if it is no loop device or is not attached."""
    try:
        text = (Path("/sys/block") / Path(device).name / "loop/backing_file").read_text()
    except OSError:
        return None
    return Path(text.rstrip("\n").removesuffix(" (deleted)"))


def loop_devices_of(file: Path) -> list[Path]:
    """Devices that are attached to `file` now."""
    found: list[Path] = []
    wanted = os.path.realpath(file)
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if entry.read_text().rstrip("\n") == wanted:
                found.append(Path("/dev") / entry.parts[3])
    return found
