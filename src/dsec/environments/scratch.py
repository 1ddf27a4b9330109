"""The writable folders of sandboxes: one btrfs subvolume each, with a limit on what it may hold.

Where the folder is not on a btrfs with quotas, an image file is made for one beside it and mounted over it. Mount and loop device outlive
us: the next `open` takes them over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.environments.names import check_owner
from dsec.environments.snapshots import LANES, SNAPSHOTS, ScratchSnapshots, disk_error
from dsec.environments.tools import run_tool
from dsec.kernel import btrfs
from dsec.kernel.loop import attached_loop, backing_file, held_loop
from dsec.kernel.mountinfo import Mount, mount_at
from dsec.kernel.mounts import ATTR_NOATIME, ATTR_NODEV, ATTR_NOSUID, attach, make_mount, unmount
from libdsec.errors import Conflict, DSecError, InvalidArgument, Unsupported

log = logging.getLogger("dsec.environments")

__all__ = ["MINIMUM_BYTES", "ScratchCapabilities", "ScratchStore"]

MINIMUM_BYTES: Final = 128 << 20
"""mkfs.btrfs makes nothing smaller."""

_LIMIT_FLOOR: Final = 1 << 20
"""An empty subvolume and the two folders in it take some tens of KiB of metadata, which count too."""

_FREE_SHARE: Final = 0.8

_NOT_ON_THIS_HOST: Final = (errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.EPERM, errno.EACCES)
"""No such file system in the kernel, no loop devices, no right to either."""

_SPOILT: Final = (errno.EINVAL, errno.EIO, errno.EUCLEAN)


@dataclass(frozen=True, slots=True)
class ScratchCapabilities:
    """`disk_limit`: limits hold. `snapshot`: O(1) copies. `image`: it lies in a file of ours. `size_bytes`: all that it could hold."""

    disk_limit: bool
    snapshot: bool
    image: bool
    size_bytes: int = 0


class ScratchStore:
    """Writable folders in `scratch` below `path` (default: the state folder). `open` comes first; all else is quick, in any thread.

    `size_bytes` is the most that an image made here may grow to; default: 80 % of what is free. On a host without btrfs or loop devices the
    folders are plain and a limit is refused with Unsupported. `run` is taken like by the other stores; nothing is kept there.
    """

    def __init__(self, state: Path, run: Path, size_bytes: int | None = None, path: Path | None = None) -> None:
        if size_bytes is not None and size_bytes < MINIMUM_BYTES:
            raise InvalidArgument(f"scratch: size {size_bytes} is too small; at least {MINIMUM_BYTES} bytes", field="scratch_size")
        place = Path(path) if path is not None else Path(state)
        self.path = place / "scratch"
        self.image = place / "scratch.img"
        self._boot_file = place / "scratch.boot"
        del run
        self._size = size_bytes
        self._fd: int | None = None
        self._filesystem = ""
        self._capabilities = ScratchCapabilities(disk_limit=False, snapshot=False, image=False)
        self.snapshots = ScratchSnapshots(self.path, self._open_fd, able=lambda: self._capabilities.snapshot)

    @property
    def capabilities(self) -> ScratchCapabilities:
        """What was found at `open`."""
        return self._capabilities

    # -- opening and closing -------------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take over or make what is needed. Idempotent. Takes some 100 ms where an image has to be made."""
        if self._fd is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._setting_up():
            mounted = mount_at(self.path)
            if not self._attach_folder(ours=mounted is not None and self._is_ours(mounted)):
                if not self._mount_image():
                    self._open_plain()
                elif not self._attach_folder(ours=True):
                    raise DSecError(f"scratch: quotas do not hold on {self.path}", cause="scratch")

    def close(self, *, unmount: bool = False) -> None:
        """Let go; with `unmount` the image's mount and loop device go too. Conflict while a sandbox still uses it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        mounted = mount_at(self.path)
        if unmount and mounted is not None and self._is_ours(mounted):
            _unmount_scratch(self.path)

    @contextlib.contextmanager
    def _setting_up(self) -> Iterator[None]:
        """One process at a time makes the image."""
        fd = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _is_ours(self, mounted: Mount) -> bool:
        return mounted.kind == "btrfs" and backing_file(mounted.source) == Path(os.path.realpath(self.image))

    def _attach_folder(self, *, ours: bool) -> bool:
        """Use the folder if it is on btrfs with quotas; they are turned on only where the file system is our own."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                filesystem = btrfs.filesystem_id(fd)
            except OSError as error:
                if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                return False
            if btrfs.quota_mode(filesystem) is None and ours:
                btrfs.enable_simple_quota(fd)
            if btrfs.quota_mode(filesystem) is None:
                return False
            self._fd, fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)
        self._filesystem = filesystem
        self._capabilities = ScratchCapabilities(disk_limit=True, snapshot=True, image=ours, size_bytes=shutil.disk_usage(self.path).total)
        self.snapshots.prepare()
        self.tidy()
        return True

    def _open_plain(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._capabilities = ScratchCapabilities(disk_limit=False, snapshot=False, image=False)

    def _mount_image(self) -> bool:
        """Mount the image, made first if need be; False if this host has no btrfs or no loop devices."""
        try:
            if not self._mount_old_image():
                self._make_image()
                _mount(self.image, self.path)
            self._boot_file.write_text(_boot_id())
        except Unsupported:
            return False
        except OSError as error:
            if error.errno in _NOT_ON_THIS_HOST:
                return False
            raise
        return True

    def _mount_old_image(self) -> bool:
        """One of an earlier life of the host goes: nobody lives on it, and what was in it was not written with a crash in mind.

        One of this life that does not mount is kept aside, the last such: it may be the mount that is at fault.
        """
        if not self.image.exists():
            return False
        if self._boot_file.exists() and self._boot_file.read_text() != _boot_id():
            self.image.unlink()
            return False
        try:
            _mount(self.image, self.path)
        except OSError as error:
            if error.errno not in _SPOILT:
                raise
            aside = self.image.with_name(self.image.name + ".spoilt")
            self.image.rename(aside)
            log.warning("%s does not mount (%s): it is kept as %s, and a new one is made", self.image, error.strerror, aside)
            return False
        return True

    def _make_image(self) -> None:
        size = self._size or max(MINIMUM_BYTES, int(shutil.disk_usage(self.path.parent).free * _FREE_SHARE))
        aside = self.image.with_name(self.image.name + ".new")
        try:
            with aside.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.truncate(size)
            run_tool(["mkfs.btrfs", "--quiet", "--force", "--data", "single", "--metadata", "single", str(aside)])
            aside.rename(self.image)
        finally:
            aside.unlink(missing_ok=True)

    # -- folders of sandboxes ------------------------------------------------------------------------------------------------------------

    def folder(self, sandbox_id: str) -> Path:
        """Where the sandbox's folder is, or would be."""
        return self.path / check_owner(sandbox_id)

    def create(self, sandbox_id: str, limit_bytes: int | None, *, like: Path | None = None) -> Path:
        """A new folder for the sandbox, holding `upper` (0755) and `work`, both 0:0. Conflict if it has one; nothing is left on failure.

        An overlay's root is what its upper's root is: with `like` it gets that folder's owner, mode, xattrs and time.
        QuotaExceeded(cause="disk") if the scratch store itself is full.
        """
        parent, name = self._open_fd(), check_owner(sandbox_id)
        if limit_bytes is not None and limit_bytes < _LIMIT_FLOOR:
            raise InvalidArgument(f"disk_limit_mb: at least {_LIMIT_FLOOR} bytes, not {limit_bytes}", field="disk_limit_mb")
        if limit_bytes is not None and not self._capabilities.disk_limit:
            raise Unsupported("disk_limit_mb: this host's scratch store has no quotas", field="disk_limit_mb")
        try:
            if self._capabilities.snapshot:
                btrfs.create_subvolume(parent, name)
            else:
                os.mkdir(name, 0o755, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.EEXIST:
                raise Conflict(f"sandbox_id: {name} has a scratch folder already", field="sandbox_id") from None
            raise disk_error(error) from error
        try:
            self._furnish(parent, name, limit_bytes, like)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.destroy(name)
            raise disk_error(error) if isinstance(error, OSError) else error from error
        return self.path / name

    def _furnish(self, parent: int, name: str, limit_bytes: int | None, like: Path | None) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.mkdir("upper", 0o755, dir_fd=fd)
            os.mkdir("work", 0o755, dir_fd=fd)
            if like is not None:
                _liken(fd, "upper", like)
            if limit_bytes is not None:
                btrfs.set_limit(fd, btrfs.subvolume_id(fd), limit_bytes)
        finally:
            os.close(fd)

    def destroy(self, sandbox_id: str) -> None:
        """Remove the sandbox's folder with all in it. Idempotent."""
        parent, name = self._open_fd(), check_owner(sandbox_id)
        if not self._capabilities.snapshot:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.path / name)
            return
        with contextlib.suppress(FileNotFoundError):
            btrfs.destroy_subvolume(parent, name)

    def usage(self, sandbox_id: str) -> int | None:
        """Bytes that the sandbox is charged with; None if it has no folder or the host does not count. New writes show after some time."""
        if not self._capabilities.disk_limit:
            return None
        try:
            fd = os.open(check_owner(sandbox_id), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._open_fd())
        except FileNotFoundError:
            return None
        try:
            return btrfs.referenced_bytes(self._filesystem, btrfs.subvolume_id(fd))
        finally:
            os.close(fd)

    def list(self) -> set[str]:
        """Ids of all sandboxes that have a folder."""
        # opened anew: btrfs shows an open folder as it was when it was opened
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._open_fd())
        names = set()
        try:
            for name in os.listdir(fd):
                if name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode) and (not self._capabilities.snapshot or found.st_ino == btrfs.ROOT_INODE):
                        names.add(name)
        finally:
            os.close(fd)
        return names

    def _open_fd(self) -> int:
        if self._fd is None:
            raise DSecError("scratch: not open", cause="scratch", ran="not-run")
        return self._fd

    def tidy(self) -> None:
        """Drop the quota groups of subvolumes that are no more, as each slows every commit. Only where the file system is our own.

        The kernel drops one with its subvolume, but not that of a sandbox whose data its forks have still.
        """
        if not self._capabilities.image:
            return
        fd = self._open_fd()
        groups = btrfs.qgroup_ids(self._filesystem)
        # What is made from now on is in no group that was listed. A copy comes from its lane to its place: it is looked for in that order.
        alive = {btrfs.TOP_LEVEL}
        for folder in (*(f"{LANES}/{lane}" for lane in os.listdir(self.path / LANES)), SNAPSHOTS, "."):
            for name in os.listdir(self.path / folder):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        alive.add(btrfs.subvolume_id(found))
                    finally:
                        os.close(found)
        for stale in groups - alive:
            if btrfs.referenced_bytes(self._filesystem, stale) == 0:
                with contextlib.suppress(OSError):  # busy: its subvolume is still being cleaned up
                    btrfs.drop_quota(fd, stale)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _liken(parent: int, name: str, like: Path) -> None:
    found = os.stat(like)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fchown(fd, found.st_uid, found.st_gid)
        os.fchmod(fd, stat.S_IMODE(found.st_mode))
        for key in os.listxattr(like):
            if not key.startswith("trusted.overlay."):
                os.setxattr(fd, key, os.getxattr(like, key))
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
    finally:
        os.close(fd)


def _mount(image: Path, target: Path) -> None:
    """Sandboxes' data are gone with the host, so nothing is checksummed, and a commit, of which each snapshot is one, does not wait for the
    disk below; what is freed goes back to the file below.

    Unmounted here, the image may still be mounted in somebody's copy of the mount table, and btrfs takes no second device for it.
    """
    with contextlib.ExitStack() as attached:
        device = attached.enter_context(held_loop(image)) or attached.enter_context(attached_loop(image))
        mount = make_mount(
            "btrfs",
            source=device,
            options=[("nodatasum", None), ("nobarrier", None), ("discard", "async")],
            attributes=ATTR_NOATIME | ATTR_NOSUID | ATTR_NODEV,
        )
        try:
            attach(mount, target)
        finally:
            os.close(mount)


def _unmount_scratch(path: Path) -> None:
    try:
        unmount(path)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise Conflict(f"scratch: {path} is in use", cause="in-use") from error
        raise
