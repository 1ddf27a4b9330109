"""btrfs by ioctl: subvolumes, their quotas and what they use. A command for the same takes 30 times as long."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import uuid
from pathlib import Path
from typing import Final

from dsec.kernel.syscalls import fail, ioctl

__all__ = [
    "ROOT_INODE",
    "TOP_LEVEL",
    "create_snapshot",
    "create_subvolume",
    "destroy_subvolume",
    "drop_quota",
    "enable_simple_quota",
    "filesystem_id",
    "qgroup_ids",
    "quota_mode",
    "referenced_bytes",
    "set_limit",
    "subvolume_id",
    "sync",
]

ROOT_INODE: Final = 256
"""Inode number of every subvolume's root folder."""

TOP_LEVEL: Final = 5
"""Id of the subvolume that a new file system has."""

_SYNC: Final = 0x9408
_SUBVOL_CREATE: Final = 0x5000940E
_SNAP_DESTROY: Final = 0x5000940F
_INO_LOOKUP: Final = 0xD0009412
_SNAP_CREATE_V2: Final = 0x50009417
_FS_INFO: Final = 0x8400941F
_QUOTA_CTL: Final = 0xC0109428
_QGROUP_CREATE: Final = 0x4010942A
_QGROUP_LIMIT: Final = 0x8030942B

_QUOTA_ENABLE_SIMPLE: Final = 4
_LIMIT_MAX_RFER: Final = 1
_VOL_ARGS = struct.Struct("=q4088s")
_VOL_ARGS_V2 = struct.Struct("=qQQ32x4040s")
_READ_ONLY: Final = 2
_NO_LIMIT: Final = (1 << 64) - 1


def _ioctl(fd: int, name: str, request: int, argument: bytes | bytearray, path: str | None = None) -> None:
    """A bytearray may be of any size and is written back; bytes are at most 1,024, which is fcntl.ioctl's limit.

    For larger ones fcntl.ioctl keeps the interpreter's lock, and some of these calls wait for the disk: they go another way.
    """
    try:
        if isinstance(argument, bytes):
            fcntl.ioctl(fd, request, argument)
        else:
            ioctl(fd, request, (ctypes.c_char * len(argument)).from_buffer(argument))
    except OSError as error:
        raise fail(f"ioctl({name})", error.errno or 0, path) from None


def _name(name: str) -> bytes:
    encoded = os.fsencode(name)
    if not 0 < len(encoded) < 256 or b"/" in encoded:
        raise fail("subvolume name", errno.EINVAL, name)
    return encoded


def _volume(name: str) -> bytearray:
    return bytearray(_VOL_ARGS.pack(0, _name(name)))


def create_subvolume(parent: int, name: str) -> None:
    """Make an empty subvolume `name` in the folder that the descriptor `parent` has open."""
    _ioctl(parent, "BTRFS_IOC_SUBVOL_CREATE", _SUBVOL_CREATE, _volume(name), name)


def create_snapshot(source: int, parent: int, name: str, *, read_only: bool) -> None:
    """A copy, as `name` in the folder `parent`, of the subvolume that `source` has open, as it is now, pages not yet written included.

    Waits until those are on their way, and for a commit, which calls for different parents at the same time share.
    """
    arguments = bytearray(_VOL_ARGS_V2.pack(source, 0, _READ_ONLY if read_only else 0, _name(name)))
    _ioctl(parent, "BTRFS_IOC_SNAP_CREATE_V2", _SNAP_CREATE_V2, arguments, name)


def destroy_subvolume(parent: int, name: str) -> None:
    """Remove a subvolume with all in it at once; its space comes back as the kernel's cleaner gets to it."""
    _ioctl(parent, "BTRFS_IOC_SNAP_DESTROY", _SNAP_DESTROY, _volume(name), name)


def subvolume_id(fd: int) -> int:
    """Id of the subvolume that the open file or folder lies in; its quota group is `0/<id>`."""
    arguments = bytearray(4096)
    struct.pack_into("=QQ", arguments, 0, 0, ROOT_INODE)
    _ioctl(fd, "BTRFS_IOC_INO_LOOKUP", _INO_LOOKUP, arguments)
    return int(struct.unpack_from("=Q", arguments)[0])


def set_limit(fd: int, subvolume: int, limit_bytes: int | None) -> None:
    """Most bytes that the subvolume may refer to, its own metadata included; past it writes give EDQUOT. None: no limit."""
    arguments = struct.pack("=QQQQQQ", subvolume, _LIMIT_MAX_RFER, _NO_LIMIT if limit_bytes is None else limit_bytes, 0, 0, 0)
    _ioctl(fd, "BTRFS_IOC_QGROUP_LIMIT", _QGROUP_LIMIT, arguments)


def drop_quota(fd: int, subvolume: int) -> None:
    """Remove the quota group of a subvolume that is no more; newer kernels do that by themselves. EBUSY while it is not yet cleaned up."""
    with contextlib.suppress(FileNotFoundError):
        _ioctl(fd, "BTRFS_IOC_QGROUP_CREATE", _QGROUP_CREATE, struct.pack("=QQ", 0, subvolume))


def enable_simple_quota(fd: int) -> None:
    """Turn on simple quotas (Linux 6.7): each extent is charged to the subvolume that first wrote it, and nothing is ever rescanned."""
    _ioctl(fd, "BTRFS_IOC_QUOTA_CTL", _QUOTA_CTL, bytearray(struct.pack("=QQ", _QUOTA_ENABLE_SIMPLE, 0)))


def filesystem_id(fd: int) -> str:
    """The file system's UUID, as /sys/fs/btrfs names it."""
    arguments = bytearray(1024)
    _ioctl(fd, "BTRFS_IOC_FS_INFO", _FS_INFO, arguments)
    return str(uuid.UUID(bytes=bytes(arguments[16:32])))


def sync(fd: int) -> None:
    """Commit the running transaction."""
    _ioctl(fd, "BTRFS_IOC_SYNC", _SYNC, b"\0" * 8)


def _groups(filesystem: str) -> Path:
    return Path("/sys/fs/btrfs") / filesystem / "qgroups"


def quota_mode(filesystem: str) -> str | None:
    """`squota` or `qgroup`, None where quotas are off."""
    try:
        if (_groups(filesystem) / "enabled").read_text().strip() != "1":
            return None
    except FileNotFoundError:
        return None
    try:
        return (_groups(filesystem) / "mode").read_text().strip()
    except FileNotFoundError:  # before simple quotas there was one mode
        return "qgroup"


def qgroup_ids(filesystem: str) -> set[int]:
    """Subvolume ids that have a quota group."""
    with contextlib.suppress(FileNotFoundError):
        return {int(name.removeprefix("0_")) for name in os.listdir(_groups(filesystem)) if name.startswith("0_")}
    return set()


def referenced_bytes(filesystem: str, subvolume: int) -> int | None:
    """What the subvolume is charged with now, as the kernel counts in memory; None if it has no quota group."""
    try:
        return int((_groups(filesystem) / f"0_{subvolume}" / "referenced").read_text())
    except FileNotFoundError:
        return None
