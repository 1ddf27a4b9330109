"""Snapshots of sandboxes' writable folders: O(1) copies that a layer is packed from, or that forked sandboxes begin with.

    <scratch>/.snapshots/<name>   subvolumes; whoever made one drops it, and a sweep drops those that nobody knows
    <scratch>/.lanes/<number>/    plain folders in which the copies for forked sandboxes are born, then renamed to their place

A copy costs a commit of the file system. Calls for different parent folders share one, those for the same parent wait for each other: the
lanes make a hundred copies three times as fast.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from dsec.environments.names import check_owner
from dsec.kernel import btrfs
from dsec.kernel.paths import folder_open, is_there
from libdsec.errors import Conflict, DSecError, NotFound, QuotaExceeded, Unsupported

__all__ = ["LANES", "RENEWED", "SNAPSHOTS", "ScratchSnapshots", "disk_error", "forget_seeds"]

SNAPSHOTS: Final = ".snapshots"
LANES: Final = ".lanes"

_LANES_AT_ONCE: Final = 16
_FLUSH_ROUNDS: Final = 4
_FLUSH_ROUNDS_MOST: Final = 12
_WORTH: Final = 0.7
"""A round after the first four that took no less than this of the one before it is the last: it is written as fast as it is dirtied."""
_FLUSHED_SECONDS: Final = 0.004
"""A round this short found next to nothing to write."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def disk_error(error: OSError) -> Exception:
    """QuotaExceeded(cause="disk") for a full disk, else the error itself."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return QuotaExceeded(f"scratch: the disk for sandboxes' files is full: {error}", field="disk_limit_mb", cause="disk")
    return error


class ScratchSnapshots:
    """Snapshots in the scratch folder `path`; `folder` gives its descriptor. Blocking calls, in any thread."""

    def __init__(self, path: Path, folder: Callable[[], int], *, able: Callable[[], bool]) -> None:
        self._path = path
        self._folder = folder
        self._able = able
        self._flushing: set[str] = set()

    def prepare(self) -> None:
        """Make the folders and remove what a crash left in the lanes."""
        for name in (SNAPSHOTS, LANES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._folder())
        for lane in range(_LANES_AT_ONCE):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{LANES}/{lane}", 0o700, dir_fd=self._folder())
            with self._opened(f"{LANES}/{lane}") as fd:
                for name in os.listdir(fd):
                    _removed(fd, name)

    def path(self, name: str) -> Path:
        """Where the snapshot lies, with `upper` and `work` in it."""
        return self._path / SNAPSHOTS / check_owner(name, field="snapshot")

    def names(self) -> set[str]:
        """All that exist, but for copies that `flushed` has made and will drop."""
        if not self._able():
            return set()
        with self._opened(SNAPSHOTS) as fd:
            return set(os.listdir(fd)) - self._flushing

    @contextlib.contextmanager
    def flushed(self, sandbox_id: str, hurry: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Write out what the sandbox's processes have dirtied while they go on, until little is left or nothing is won, or `hurry` says so;
        in the block `take` is quick.

        There is no call that writes out one subvolume alone but that which copies it: copies are made, and dropped after the block, since
        what cleans up behind a copy would be in the way of the next. A sync of the whole file system would wait for all its neighbours.
        """
        made: list[str] = []
        with self._source(sandbox_id) as source, self._opened(SNAPSHOTS) as parent:
            try:
                before = float("inf")
                for turn in range(_FLUSH_ROUNDS_MOST):
                    if hurry():
                        break
                    began = time.monotonic()
                    name = f"flush-{sandbox_id}-{turn}"
                    self.drop(name)
                    self._flushing.add(name)
                    made.append(name)
                    _copied(source, parent, name, read_only=True)
                    took = time.monotonic() - began
                    if took < _FLUSHED_SECONDS or (turn + 1 >= _FLUSH_ROUNDS and took > before * _WORTH):
                        break
                    before = took
                yield
            finally:
                for name in made:
                    self.drop(name)
                    self._flushing.discard(name)

    def take(self, sandbox_id: str, name: str, *, read_only: bool) -> None:
        """Copy the sandbox's folder as it is now; of one moment only if its processes stand. Conflict if there is such a snapshot."""
        check_owner(name, field="snapshot")
        with self._source(sandbox_id) as source, self._opened(SNAPSHOTS) as parent:
            _copied(source, parent, name, read_only=read_only)

    def branchable(self, name: str, forget: Callable[[int], None]) -> None:
        """Make a writable snapshot such as a new sandbox begins with: its `work` is new, as overlayfs refuses one that was in use.

        `forget` gets the upper's descriptor and removes what no copy of a sandbox may have.
        """
        with self._opened(f"{SNAPSHOTS}/{check_owner(name, field='snapshot')}") as fd:
            shutil.rmtree("work", dir_fd=fd)
            os.mkdir("work", 0o755, dir_fd=fd)
            upper = os.open("upper", _FOLDER, dir_fd=fd)
            try:
                forget(upper)
            finally:
                os.close(upper)

    def branch(self, name: str, limits: Mapping[str, int | None]) -> dict[str, Exception]:
        """Make the folders of the sandboxes in `limits`, each a copy of the snapshot with its own limit in bytes for what it writes itself.

        Returns why those that are not there are not: on a full disk some may be and some not.
        """
        lanes = min(_LANES_AT_ONCE, len(limits))
        items = list(limits.items())
        failed: dict[str, Exception] = {}

        def work(lane: int) -> None:
            with self._opened(f"{LANES}/{lane}") as parent:
                for sandbox_id, limit in items[lane::lanes]:
                    try:
                        self._branch(source, parent, check_owner(sandbox_id), limit)
                    except OSError as error:
                        failed[sandbox_id] = disk_error(error)
                    except DSecError as error:
                        failed[sandbox_id] = error

        with self._opened(f"{SNAPSHOTS}/{check_owner(name, field='snapshot')}") as source:
            if lanes == 1:
                work(0)
            else:
                with ThreadPoolExecutor(lanes, thread_name_prefix="dsec-branch") as threads:
                    list(threads.map(work, range(lanes)))
        return failed

    def _branch(self, source: int, lane: int, sandbox_id: str, limit: int | None) -> None:
        btrfs.create_snapshot(source, lane, sandbox_id, read_only=False)
        try:
            if limit is not None:
                fd = os.open(sandbox_id, _FOLDER, dir_fd=lane)
                try:
                    btrfs.set_limit(fd, btrfs.subvolume_id(fd), limit)
                finally:
                    os.close(fd)
            os.rename(sandbox_id, sandbox_id, src_dir_fd=lane, dst_dir_fd=self._folder())
        except BaseException:
            with contextlib.suppress(OSError):
                btrfs.destroy_subvolume(lane, sandbox_id)
            raise

    def drop(self, name: str) -> None:
        """Remove the snapshot. Idempotent; copies made from it stay."""
        check_owner(name, field="snapshot")
        if self._able():
            with self._opened(SNAPSHOTS) as fd, contextlib.suppress(FileNotFoundError):
                _removed(fd, name)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        # opened anew each time: btrfs shows an open folder's list as it was when it was opened
        fd = os.open(path, _FOLDER, dir_fd=self._folder())
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _source(self, sandbox_id: str) -> Iterator[int]:
        if not self._able():
            raise Unsupported("snapshots: this host's scratch store is not on btrfs", field="backend")
        try:
            fd = os.open(check_owner(sandbox_id), _FOLDER, dir_fd=self._folder())
        except FileNotFoundError:
            raise NotFound(f"{sandbox_id} has no scratch folder", field="sandbox_id") from None
        try:
            yield fd
        finally:
            os.close(fd)


def _removed(parent: int, name: str) -> None:
    """What is there under a name that only subvolumes have, whoever put it there."""
    try:
        btrfs.destroy_subvolume(parent, name)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTDIR):
            raise
        if error.errno == errno.ENOTDIR or not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            os.unlink(name, dir_fd=parent)
        else:
            shutil.rmtree(name, dir_fd=parent)


def _copied(source: int, parent: int, name: str, *, read_only: bool) -> None:
    try:
        btrfs.create_snapshot(source, parent, name, read_only=read_only)
    except FileExistsError:
        raise Conflict(f"snapshot: there is one named {name}", field="snapshot") from None
    except OSError as error:
        raise disk_error(error) from error


RENEWED: Final = ("var/lib/systemd/random-seed", "var/lib/urandom/random-seed", "var/lib/random-seed")
"""Files of which every copy of a sandbox must have its own, and that are simply made anew where they are missing."""


def forget_seeds(upper: int, lowers: Sequence[Path]) -> None:
    """Remove saved random seeds from the upper folder, without showing again what a layer below (`lowers`, the topmost first) has there."""
    for path in RENEWED:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, OSError):
            _forget(upper, path, lowers)


def _brings(lower: Path, path: str) -> bool:
    with folder_open(lower) as root:
        return is_there(root, os.fsencode(path).split(b"/"))


def _forget(upper: int, path: str, lowers: Sequence[Path]) -> None:
    *folders, name = path.split("/")
    fd = os.dup(upper)
    try:
        for part in folders:
            deeper = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = deeper
        if not stat.S_ISREG(os.lstat(name, dir_fd=fd).st_mode):
            return
        os.unlink(name, dir_fd=fd)
        if any(_brings(lower, path) for lower in lowers):
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=fd)
    finally:
        os.close(fd)
