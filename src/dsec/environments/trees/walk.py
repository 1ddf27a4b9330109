"""A folder of the host as a tree, its files' contents handed on while they are read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from dsec.environments.trees.model import OPAQUE, REDIRECT, Node, Segment
from libdsec.errors import Unsupported

__all__ = ["AddContent", "keep_all", "keep_overlay_marks", "walk"]

_OVERLAY: Final = b"trusted.overlay."
_MARKS: Final = (OPAQUE, REDIRECT)
_PIECE: Final = 1 << 20
_AT_ONCE: Final = 256 << 10
"""Files up to this size are read by one call."""
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UNIT: Final = 512
"""Of st_blocks."""
_DEEPEST: Final = 2048
_LONGEST: Final = 64 << 10
"""Bytes of a path. No program needs as much, but any can make more: what handles a tree later does it in memory, a path at a time."""
_SHOWN: Final = 300
"""Bytes of a path that an error tells."""


class AddContent(Protocol):
    """Takes in one file, as `Packer.add` does: bytes, or lengths of zeros, to its size, inline content and segments."""

    def __call__(self, pieces: Iterable[bytes | int], size: int | None = None, /) -> tuple[int, bytes | None, tuple[Segment, ...]]: ...


def keep_all(name: bytes) -> bool:
    """Every xattr but those in which overlayfs keeps its own state."""
    return not name.startswith(_OVERLAY)


def keep_overlay_marks(name: bytes) -> bool:
    """For an overlay's upper folder: also what makes it a layer, opaque marks and redirects.

    Overlayfs's notes on where a file came from (origin, impure, nlink, uuid, protattr) mean nothing elsewhere.
    """
    return name in _MARKS or not name.startswith(_OVERLAY)


def walk(
    source: Path | int,
    add: AddContent,
    *,
    keep_xattr: Callable[[bytes], bool] = keep_all,
    skip: Callable[[bytes, os.stat_result], bool] | None = None,
    one_file_system: bool = True,
) -> Node:
    """The tree of a folder (a path or an open descriptor): owners, modes, times, links, devices, holes and xattrs.

    No symbolic link is followed and nothing outside is read, whatever others do in the folder meanwhile. Holes are not read. `skip` is
    asked with each path (from the root, without a leading slash), what it wants is left out with all that is below. With
    `one_file_system` other mounts are empty folders. Raises OSError, with the path, if something cannot be read or goes while it is read;
    Unsupported(cause="too-deep") for more than 2,048 folders in each other, or a path of more than 64 KiB.
    """
    if isinstance(source, int):
        root = os.open(".", _FLAGS | os.O_DIRECTORY, dir_fd=source)
    else:
        root = os.open(source, _FLAGS & ~os.O_NOFOLLOW | os.O_DIRECTORY)
    return _Walk(add, keep_xattr, skip, one_file_system).tree(root)


class _Level:
    """A folder on the way down, and what of it waits for its turn."""

    __slots__ = ("below", "identity", "name")

    def __init__(self, name: bytes, status: os.stat_result, below: Iterator[tuple[bytes, Node]]) -> None:
        self.name = name
        self.identity = (status.st_dev, status.st_ino)
        self.below = below


class _Walk:
    def __init__(
        self,
        add: AddContent,
        keep_xattr: Callable[[bytes], bool],
        skip: Callable[[bytes, os.stat_result], bool] | None,
        one_file_system: bool,
    ) -> None:
        self._add = add
        self._keep_xattr = keep_xattr
        self._skip = skip
        self._one_file_system = one_file_system
        self._linked: dict[tuple[int, int], Node] = {}
        self._kept: dict[bytes, bool] = {}

    def tree(self, root: int) -> Node:
        """Depth first, with the one folder open that is being read; `root` is closed."""
        fd = root
        try:
            status = os.fstat(fd)
            device = status.st_dev
            node = Node(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, self._xattrs(fd), children={})
            levels = [_Level(b"", status, self._list(fd, b"", node))]
            length = 0
            while True:
                entry = next(levels[-1].below, None)
                if entry is None:
                    length -= len(levels.pop().name) + 1
                    if not levels:
                        return node
                    fd = _exchanged(fd, self._parent(fd, levels))
                    continue
                name, child = entry
                length += len(name) + 1
                if len(levels) > _DEEPEST or length > _LONGEST:
                    raise Unsupported(
                        f"a tree too deep for a layer: {_DEEPEST} folders in each other and paths of {_LONGEST} bytes are allowed, not "
                        f"{_shown(_path(levels, name))}",
                        cause="too-deep",
                        ran="ran",
                    )
                try:
                    entered = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=fd)
                except OSError as error:
                    raise _at(error, _path(levels, name)) from error
                fd = _exchanged(fd, entered)
                status = os.fstat(fd)
                listed = iter(()) if self._one_file_system and status.st_dev != device else self._list(fd, _path(levels, name), child)
                levels.append(_Level(name, status, listed))
        finally:
            os.close(fd)

    @staticmethod
    def _parent(fd: int, levels: Sequence[_Level]) -> int:
        """The folder above, if it is the one that we came from."""
        parent = os.open("..", _FLAGS | os.O_DIRECTORY, dir_fd=fd)
        status = os.fstat(parent)
        if (status.st_dev, status.st_ino) != levels[-1].identity:
            os.close(parent)
            raise _at(OSError(errno.ESTALE, "a folder was moved while it was read"), _path(levels))
        return parent

    def _list(self, fd: int, path: bytes, folder: Node) -> Iterator[tuple[bytes, Node]]:
        """Take in a folder's entries; gives those that are folders, for their own turn."""
        children = folder.children
        assert children is not None
        below = []
        name = b""
        try:
            with os.scandir(fd) as entries:
                found = sorted([(os.fsencode(entry.name), entry) for entry in entries], key=lambda pair: pair[0])
            for name, entry in found:
                child = self._file(fd, path, name) if entry.is_file(follow_symlinks=False) else self._other(fd, path, name, entry)
                if child is not None:
                    children[name] = child
                    if child.children is not None:
                        below.append((name, child))
        except OSError as error:
            raise _at(error, path + b"/" + name if path else name) from error
        return iter(below)

    def _wanted(self, path: bytes, name: bytes, status: os.stat_result) -> bool:
        return self._skip is None or not self._skip(path + b"/" + name if path else name, status)

    def _file(self, folder: int, path: bytes, name: bytes) -> Node | None:
        """A regular file: all is asked of the one that was opened."""
        fd = os.open(name, _FLAGS, dir_fd=folder)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.ESTALE, "it was replaced while it was read")
            if not self._wanted(path, name, status):
                return None
            if status.st_nlink > 1 and (known := self._linked.get((status.st_dev, status.st_ino))) is not None:
                return known
            node = Node(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, self._xattrs(fd))
            node.size, node.inline, node.segments = self._content(fd, status)
            if status.st_nlink > 1:
                self._linked[status.st_dev, status.st_ino] = node
            return node
        finally:
            os.close(fd)

    def _other(self, folder: int, path: bytes, name: bytes, entry: os.DirEntry[str]) -> Node | None:
        status = entry.stat(follow_symlinks=False)
        if not self._wanted(path, name, status):
            return None
        key = (status.st_dev, status.st_ino)
        if not stat.S_ISDIR(status.st_mode) and (known := self._linked.get(key)) is not None:
            return known
        # by way of /proc the folder is the one that is open, and of the entry itself no link is followed
        node = Node(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, self._xattrs(b"/proc/self/fd/%d/%s" % (folder, name)))
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            node.children = {}
            return node
        if kind == stat.S_IFLNK:
            node.target = os.readlink(name, dir_fd=folder)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            node.rdev = status.st_rdev
        elif kind == stat.S_IFREG:
            raise OSError(errno.ESTALE, "it was replaced while it was read")
        if status.st_nlink > 1:
            self._linked[key] = node
        return node

    def _xattrs(self, where: bytes | int) -> dict[bytes, bytes]:
        follow = isinstance(where, int)
        try:
            names = os.listxattr(where) if follow else os.listxattr(where, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                return {}
            raise
        xattrs = {}
        for text in names:
            name = os.fsencode(text)
            kept = self._kept.get(name)
            if kept is None:
                kept = self._kept[name] = self._keep_xattr(name)
            if kept:
                xattrs[name] = os.getxattr(where, name) if follow else os.getxattr(where, name, follow_symlinks=False)
        return xattrs

    def _content(self, fd: int, status: os.stat_result) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        size = status.st_size
        if not size:
            return self._add((), 0)
        if size <= _AT_ONCE and status.st_blocks * _UNIT >= size:
            data = os.read(fd, size)
            if len(data) == size:
                return self._add((data,), size)
        return self._add(_pieces(fd, size), size)


def _pieces(fd: int, size: int) -> Iterator[bytes | int]:
    """A file's bytes up to `size`, its holes as their lengths."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    at = 0
    while at < size:
        try:
            start = min(size, os.lseek(fd, at, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            start = size
        if start > at:
            yield start - at
        end = min(size, os.lseek(fd, start, os.SEEK_HOLE)) if start < size else size
        at = start
        while at < end:
            data = os.pread(fd, min(_PIECE, end - at), at)
            if not data:
                raise OSError(errno.ESTALE, "it became shorter while it was read")
            at += len(data)
            yield data


def _exchanged(old: int, new: int) -> int:
    os.close(old)
    return new


def _path(levels: Sequence[_Level], *names: bytes) -> bytes:
    return b"/".join([*(level.name for level in levels[1:]), *names])


def _shown(path: bytes) -> str:
    if len(path) > _SHOWN:
        path = path[: _SHOWN // 2] + b"[...]" + path[-_SHOWN // 2 :]
    return os.fsdecode(path or b".")


def _at(error: OSError, path: bytes) -> OSError:
    return OSError(error.errno, error.strerror, _shown(path))
