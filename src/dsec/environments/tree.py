"""Writing a tree on the word of a stranger: every path is resolved by the kernel inside the tree's root (openat2), links and all.

A symbolic link in the tree may point anywhere; it is followed as it would be in a sandbox that has the tree as its root, so honest ones
work and none leads out. Names with `..` are refused; a leading `/` is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

from dsec.kernel.paths import open_in
from libdsec.errors import InvalidArgument, QuotaExceeded

__all__ = ["Attributes", "RootedTree", "furnish_base", "refuse"]

_FOLDER: Final = os.O_PATH | os.O_DIRECTORY
_BUDGET_SHARE: Final = 0.9
_ZEROS: Final = bytes(1 << 16)
_KEPT_XATTRS: Final = ("security.capability", "system.posix_acl_access", "system.posix_acl_default", "trusted.overlay.opaque")


@dataclass(frozen=True, slots=True)
class Attributes:
    """Of one entry. `mode` is the permission bits."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


def refuse(name: str, why: str) -> NoReturn:
    """Refuse an archive for one of its members."""
    raise InvalidArgument(f"source: the archive's member {name!r:.300} {why}", field="source", cause="archive")


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        refuse(name, "has '..' in its name")
    if "\0" in name:
        refuse(name, "has a NUL in its name")
    return parts


class RootedTree:
    """The tree at `root`, an existing folder. Closing it sets the times of folders, which writing into them has changed.

    `budget_bytes` (default: most of what the disk has free) bounds what files may hold in all: QuotaExceeded past it.
    """

    def __init__(self, root: Path, *, budget_bytes: int | None = None) -> None:
        self.path = root
        self._budget = budget_bytes if budget_bytes is not None else int(shutil.disk_usage(root).free * _BUDGET_SHARE)
        self._root = os.open(root, _FOLDER | os.O_CLOEXEC)
        # by inode; a new tree's own time would make equal trees differ
        self._times: dict[int, int] = {os.fstat(self._root).st_ino: 0}
        self._parent_name: str | None = None
        self._parent = -1

    def __enter__(self) -> RootedTree:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._settle_times()
        finally:
            self._forget_parent()
            os.close(self._root)

    def _settle_times(self) -> None:
        for folder, _, _, fd in os.fwalk(".", dir_fd=self._root, topdown=False):
            del folder
            if (mtime := self._times.get(os.fstat(fd).st_ino)) is not None:
                os.utime(fd, ns=(mtime, mtime))

    # -- finding the place ---------------------------------------------------------------------------------------------------------------

    def _forget_parent(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
        self._parent, self._parent_name = -1, None

    def _open_folder(self, parts: list[str], *, make: bool) -> int:
        """O_PATH descriptor; what is missing on the way is made, 0755 and 0:0."""
        try:
            return open_in(self._root, "/".join(parts) or ".", _FOLDER)
        except FileNotFoundError:
            if not make or not parts:
                raise
        above = self._open_folder(parts[:-1], make=True)
        try:
            self._remember(above)
            with contextlib.suppress(FileExistsError):  # a dangling link: the open below says so
                os.mkdir(parts[-1], 0o755, dir_fd=above)
                self._times[os.stat(parts[-1], dir_fd=above, follow_symlinks=False).st_ino] = 0
            # by the whole path: the last part may be a link that was made meanwhile, by an earlier member
            return open_in(self._root, "/".join(parts), _FOLDER)
        finally:
            os.close(above)

    def _remember(self, folder: int) -> None:
        found = os.fstat(folder)
        self._times.setdefault(found.st_ino, found.st_mtime_ns)

    def _locate(self, name: str, *, make: bool = True) -> tuple[int, str]:
        """Descriptor of the folder (kept until the next call) and the last part. ('' for the root itself.)"""
        parts = _parts(name)
        if not parts:
            return self._root, ""
        key = "/".join(parts[:-1])
        if key != self._parent_name:
            self._forget_parent()
            try:
                self._parent = self._open_folder(parts[:-1], make=make)
            except NotADirectoryError:
                refuse(name, "lies below something that is no folder")
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOENT) and make:
                    refuse(name, "lies below a link that leads nowhere")
                raise
            self._parent_name = key
            self._remember(self._parent)
        return self._parent, parts[-1]

    def _vacate(self, parent: int, leaf: str, *, for_folder: bool = False) -> bool:
        """Take away what is in the place; True if a folder stays there to be used."""
        try:
            mode = os.stat(leaf, dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(mode):
            if for_folder:
                return True
            shutil.rmtree(leaf, dir_fd=parent)
        else:
            os.unlink(leaf, dir_fd=parent)
        return False

    # -- entries -------------------------------------------------------------------------------------------------------------------------

    def add_folder(self, name: str, attributes: Attributes) -> None:
        """Make it, or give the folder that is there already these attributes. One that replaces a link does not follow it."""
        parent, leaf = self._locate(name)
        if not leaf:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        else:
            if not self._vacate(parent, leaf, for_folder=True):
                os.mkdir(leaf, 0o700, dir_fd=parent)
            fd = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            self._dress(fd, attributes)
            self._times[os.fstat(fd).st_ino] = attributes.mtime_ns
        finally:
            os.close(fd)
        self._forget_parent()

    def add_file(self, name: str, pieces: Iterable[bytes], attributes: Attributes) -> None:
        """A regular file holding `pieces`; runs of zeros become holes."""
        parent, leaf = self._place(name)
        fd = os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            size = 0
            for piece in pieces:
                self._budget -= len(piece)
                if self._budget < 0:
                    raise QuotaExceeded("source: the archive's files take more than the disk has", field="source", cause="disk", ran="ran")
                if len(piece) >= 4096 and piece == _ZEROS[: len(piece)]:
                    os.lseek(fd, len(piece), os.SEEK_CUR)
                else:
                    _write_all(fd, piece)
                size += len(piece)
            os.ftruncate(fd, size)
            self._dress(fd, attributes)
            os.utime(fd, ns=(attributes.mtime_ns, attributes.mtime_ns))
        finally:
            os.close(fd)

    def add_symlink(self, name: str, target: str, attributes: Attributes) -> None:
        """A symbolic link, taken as it is."""
        if not target or "\0" in target:
            refuse(name, "is a link to nothing")
        parent, leaf = self._place(name)
        os.symlink(target, leaf, dir_fd=parent)
        os.chown(leaf, attributes.uid, attributes.gid, dir_fd=parent, follow_symlinks=False)
        self._set_xattrs(f"/proc/self/fd/{parent}/{leaf}", attributes.xattrs)
        os.utime(leaf, ns=(attributes.mtime_ns, attributes.mtime_ns), dir_fd=parent, follow_symlinks=False)
        self._forget_parent()

    def add_hard_link(self, name: str, target: str) -> None:
        """Another name of a file that is in the tree already; refused if it is not, or is a folder."""
        try:
            origin = open_in(self._root, "/".join(_parts(target)) or ".", os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            refuse(name, f"is a hard link to {target!r:.300}, which is not in the archive")
        try:
            found = os.fstat(origin)
            if stat.S_ISDIR(found.st_mode):
                refuse(name, "is a hard link to a folder")
            parent, leaf = self._locate(name)
            if not leaf:
                refuse(name, "is the root, and no folder")
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(leaf, dir_fd=parent, follow_symlinks=False)
                if (there.st_ino, there.st_dev) == (found.st_ino, found.st_dev):
                    return
            self._vacate(parent, leaf)
            os.link(f"/proc/self/fd/{origin}", leaf, dst_dir_fd=parent, follow_symlinks=True)
        finally:
            os.close(origin)

    def add_node(self, name: str, kind: int, device: int, attributes: Attributes) -> None:
        """A device, fifo or socket; `kind` is its S_IFMT bits. A character device 0:0 is overlayfs's whiteout."""
        parent, leaf = self._place(name)
        os.mknod(leaf, kind | 0o600, device, dir_fd=parent)
        os.chown(leaf, attributes.uid, attributes.gid, dir_fd=parent, follow_symlinks=False)
        os.chmod(leaf, attributes.mode, dir_fd=parent)
        self._set_xattrs(f"/proc/self/fd/{parent}/{leaf}", attributes.xattrs)
        os.utime(leaf, ns=(attributes.mtime_ns, attributes.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Take away what a whiteout hides; nothing if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            parent, leaf = self._locate(name, make=False)
            if not leaf:
                refuse(name, "would remove the root")
            self._vacate(parent, leaf)
            self._forget_parent()

    def clear(self, name: str, *, keep: Iterable[str] = ()) -> None:
        """Take away all in the folder but the names in `keep`; nothing if it is not there."""
        kept = set(keep)
        try:
            fd = open_in(self._root, "/".join(_parts(name)) or ".", os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            self._remember(fd)
            for leaf in os.listdir(fd):
                if leaf not in kept:
                    self._vacate(fd, leaf)
        finally:
            os.close(fd)
        self._forget_parent()

    def exists(self, name: str, *, follow: bool = False) -> bool:
        """Whether there is something, at the end of links if `follow`."""
        try:
            os.close(open_in(self._root, "/".join(_parts(name)) or ".", os.O_PATH | (0 if follow else os.O_NOFOLLOW)))
        except OSError:
            return False
        return True

    def make_root(self, name: str) -> Path:
        """Make the folder and those above it, and return where it really is: for a tool that writes there by itself, honestly."""
        fd = self._open_folder(_parts(name), make=True)
        try:
            return Path(os.readlink(f"/proc/self/fd/{fd}"))
        finally:
            os.close(fd)

    def keep_times(self, folder: Path) -> None:
        """What another tool made of this folder's time is meant to stay."""
        found = folder.lstat()
        self._times[found.st_ino] = found.st_mtime_ns

    # -- attributes ----------------------------------------------------------------------------------------------------------------------

    def _place(self, name: str) -> tuple[int, str]:
        parent, leaf = self._locate(name)
        if not leaf:
            refuse(name, "is the root, and no folder")
        self._vacate(parent, leaf)
        return parent, leaf

    def _dress(self, fd: int, attributes: Attributes) -> None:
        """Owner first: changing it clears set-uid bits and capabilities."""
        os.fchown(fd, attributes.uid, attributes.gid)
        os.fchmod(fd, attributes.mode & 0o7777)
        self._set_xattrs(fd, attributes.xattrs)

    def _set_xattrs(self, where: int | str, xattrs: Mapping[str, bytes]) -> None:
        """Those that a sandbox sees or a layer needs. Overlayfs's other marks (redirect, metacopy) let a stranger compose paths."""
        for name, value in xattrs.items():
            if name.startswith("user.") or name in _KEPT_XATTRS:
                if isinstance(where, int):
                    os.setxattr(where, name, value)
                else:
                    os.setxattr(where, name, value, follow_symlinks=False)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


_BASE_FOLDERS: Final = (("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("tmp", 0o1777), ("etc", 0o755), ("run", 0o755), ("root", 0o700))
_BASE_FILES: Final = (
    ("etc/hosts", b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"),
    ("etc/hostname", b"sandbox\n"),
    ("etc/resolv.conf", b""),
)


def furnish_base(tree: RootedTree) -> None:
    """What a sandbox's root must have to be mounted and bound over; what is there stays, except links that lead nowhere."""
    for name, mode in _BASE_FOLDERS:
        if not tree.exists(name, follow=True):
            tree.add_folder(name, Attributes(mode=mode))
    for name, content in _BASE_FILES:
        if not tree.exists(name, follow=True):
            tree.add_file(name, [content], Attributes(mode=0o644))
