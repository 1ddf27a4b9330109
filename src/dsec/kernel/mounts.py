"""The mount API by descriptors: a file system is configured, made and then moved to its place, or not placed at all.

All descriptors are close-on-exec. A mount that was made and not moved goes away when its descriptor is closed, so a crash in the middle
leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from dsec.kernel.syscalls import fail, syscall, umount2

__all__ = [
    "ATTR_IDMAP",
    "ATTR_NOATIME",
    "ATTR_NODEV",
    "ATTR_NOEXEC",
    "ATTR_NOSUID",
    "ATTR_RDONLY",
    "MS_PRIVATE",
    "attach",
    "clone_tree",
    "make_mount",
    "set_attributes",
    "unmount",
]

ATTR_RDONLY: Final = 0x1
ATTR_NOSUID: Final = 0x2
ATTR_NODEV: Final = 0x4
ATTR_NOEXEC: Final = 0x8
ATTR_NOATIME: Final = 0x10
ATTR_IDMAP: Final = 0x100000
MS_PRIVATE: Final = 1 << 18

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_CLOEXEC: Final = 1
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
_SET_FLAG, _SET_STRING, _SET_FD, _CMD_CREATE = 0, 1, 5, 6
_UMOUNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8


@contextlib.contextmanager
def _context(kind: str) -> Iterator[int]:
    fd = syscall("fsopen", kind.encode(), _CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _complaint(context: int) -> str:
    """What the file system's own log says of the last failure; each read gives one line, `e text`, `w text` or `i text`."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        while line := os.read(context, 4096):
            lines.append(line.decode(errors="replace").strip().removeprefix("e "))
    return "; ".join(lines)


def _configure(context: int, command: int, key: str | None, value: str | bytes | None, aux: int) -> None:
    try:
        syscall("fsconfig", context, command, None if key is None else key.encode(), None if value is None else os.fsencode(value), aux)
    except OSError as error:
        gist = "fsconfig(create)" if key is None else f"fsconfig({key})"
        raise fail(gist, error.errno or 0, detail=_complaint(context)) from None


def make_mount(
    kind: str,
    *,
    source: str | os.PathLike[str] | None = None,
    options: Iterable[tuple[str, str | int | None]] = (),
    attributes: int = 0,
) -> int:
    """Make a file system and return the descriptor of its unattached mount.

    An option's value is text, None for a flag, or an int for a descriptor (FSCONFIG_SET_FD). Options are set in order, `source` first.
    `ro` among them makes the superblock read-only, which `attributes` alone does not.
    """
    with _context(kind) as context:
        if source is not None:
            _configure(context, _SET_STRING, "source", os.fspath(source), 0)
        for key, value in options:
            if value is None:
                _configure(context, _SET_FLAG, key, None, 0)
            elif isinstance(value, int):
                _configure(context, _SET_FD, key, None, value)
            else:
                _configure(context, _SET_STRING, key, value, 0)
        _configure(context, _CMD_CREATE, None, None, 0)
        try:
            return syscall("fsmount", context, _CLOEXEC, attributes)
        except OSError as error:
            raise fail("fsmount", error.errno or 0, source, detail=_complaint(context)) from None


def attach(mount: int, target: str | os.PathLike[str]) -> None:
    """Place an unattached mount at `target`. The descriptor stays open and stays the caller's."""
    syscall("move_mount", mount, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH, path=target)


def clone_tree(path: str | os.PathLike[str], *, recursive: bool = False) -> int:
    """A descriptor of an unattached copy of the mount at `path`, rooted there: a bind mount that has no place yet."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return syscall("open_tree", _AT_FDCWD, os.fsencode(path), flags, path=path)


def set_attributes(
    mount: int, *, add: int = 0, remove: int = 0, propagation: int = 0, user_namespace: int | None = None, recursive: bool = False
) -> None:
    """mount_setattr(2) on a descriptor. `user_namespace` (a descriptor) makes it idmapped; only once, before it is placed."""
    if user_namespace is not None:
        add |= ATTR_IDMAP
    attributes = struct.pack("=4Q", add, remove, propagation, user_namespace or 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    syscall("mount_setattr", mount, b"", flags, attributes, len(attributes))


def unmount(path: str | os.PathLike[str], *, lazy: bool = False) -> None:
    """Take the topmost mount away from `path`, never following a symbolic link there. `lazy` detaches it even while it is in use."""
    umount2(path, _UMOUNT_NOFOLLOW | (_UMOUNT_DETACH if lazy else 0))
