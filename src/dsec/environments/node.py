"""The layers that this node has mounted, and who uses them.

    <state>/layers/<hex>.erofs       the metadata image, copied here once and verified
    <run>/layers/<first 12 of hex>/  the EROFS mount; data is read from the store on demand
    <run>/owners/<owner>             the digests that a sandbox uses, one a line

What is used here is noted in the store, too (see `holders`), so that no other node removes it.

The kernel's mount table and the owners' files are the truth, so that any process (and the next one after a crash) finds the same; what is
in memory only spares looking.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from dsec.environments.blobcache import PackAccess
from dsec.environments.deadlines import within
from dsec.environments.durable import copy_verified, digest_file
from dsec.environments.holders import Holding
from dsec.environments.leases import LeasedFolders
from dsec.environments.manifest import Manifest
from dsec.environments.names import check_owner
from dsec.environments.parallel import at_once
from dsec.environments.readahead import reading_ahead
from dsec.environments.store import METADATA, LayerStore, lost
from dsec.environments.traces import load_trace, replay_trace
from dsec.kernel.erofs import mount_erofs, mounted_image
from dsec.kernel.mountinfo import mounts_below
from dsec.kernel.mounts import unmount
from libdsec.errors import SandboxFailed

__all__ = ["NodeLayers"]

_SHORT = 12
_AT_ONCE = 8


class NodeLayers:
    """Mounts of layers below `run`, shared by all sandboxes of the node. Thread-safe; several processes may work on one `run`."""

    def __init__(
        self, state: Path, run: Path, store: LayerStore, staging: LeasedFolders, access: PackAccess, *, store_deadline_seconds: float
    ) -> None:
        self._local = state / "layers"
        self._mounts = run / "layers"
        self._owners = run / "owners"
        self._owner_aside = run / "owner.new"
        self._lock_path = run / "layers.lock"
        self._store = store
        self._staging = staging
        self._access = access
        self._deadline = store_deadline_seconds
        self._lock = threading.RLock()
        self._mounted: dict[str, Path] = {}
        self._coming: list[frozenset[str]] = []
        self._replayed: set[str] = set()
        self._ready = False
        self.holding = Holding(store, state)
        self.tells_store = True
        """A sweep tells the store what is used here. Not where the store hangs and who sweeps is to end."""

    # -- who uses what -------------------------------------------------------------------------------------------------------------------

    def uses(self) -> dict[str, set[str]]:
        """Digest to its owners, as the files say now."""
        found: dict[str, set[str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for file in self._owners.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    for digest in file.read_text().split():
                        found.setdefault(digest, set()).add(file.name)
        return found

    def owners(self) -> set[str]:
        """All that have acquired and not released."""
        return set(os.listdir(self._owners)) if self._owners.is_dir() else set()

    def acquire(self, digests: Sequence[str], owner: str) -> list[str]:
        """Mount what is not mounted, note the owner, and return the mounts' paths in the order of `digests`.

        Nothing is noted if a layer fails; layers mounted before it stay mounted for the next one. Acquiring again replaces what the owner
        had. Raises SandboxFailed(cause="store-lost") for a layer that is missing or damaged, or whose store does not answer.
        """
        check_owner(owner)
        if not self._ready:
            with self._exclusive():
                pass
        fetched = frozenset(digest for digest in digests if digest not in self._mounted)
        self._coming.append(fetched)
        try:
            return self._acquire(digests, owner, fetched)
        finally:
            self._coming.remove(fetched)

    def _acquire(self, digests: Sequence[str], owner: str, fetched: frozenset[str]) -> list[str]:
        if fetched:
            self._hold(fetched)
            self._fetch(sorted(fetched))
        new = set(fetched)
        with self._exclusive():
            paths = [str(self._mount(digest, new)) for digest in digests]
            # whoever reads it meanwhile, or after a crash of ours, finds it whole
            fd = os.open(self._owner_aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, "\n".join([*digests, ""]).encode())
            finally:
                os.close(fd)
            os.rename(self._owner_aside, self._owners / owner)
        if new:
            try:
                self._hold(new)
            except BaseException:
                self.release(owner)
                raise
        self._read_ahead(fetched)
        return paths

    def _hold(self, digests: Collection[str]) -> None:
        self._with_store(min(digests), partial(self.holding.hold, sorted(digests)))

    def _read_ahead(self, fetched: frozenset[str]) -> None:
        """What was read of these layers elsewhere will be read here."""
        if not self._access.settings.replay or self._access.direct:
            return
        with self._lock:
            new = fetched - self._replayed
            self._replayed |= new

        def replay() -> None:
            for digest in new:
                if (trace := load_trace(self._store, digest)) is not None:
                    replay_trace(self._access, trace)

        if new:
            threading.Thread(target=replay, name="dsec-replay", daemon=True).start()

    def absent(self, digests: Sequence[str]) -> bool:
        """Whether one of them is not known to be mounted."""
        return any(digest not in self._mounted for digest in digests)

    def release(self, owner: str) -> None:
        """The owner uses nothing any more. Idempotent; mounts stay until a sweep."""
        check_owner(owner)
        with contextlib.suppress(FileNotFoundError):
            (self._owners / owner).unlink()

    def sweep(self, keep_owners: Collection[str] | Callable[[], Collection[str]]) -> list[str]:
        """Forget owners that are not in `keep_owners`, unmount what nobody uses, drop local copies of layers that are no more.

        While sandboxes are being made give a callable: it is asked when nobody can acquire, so that it knows each owner that has.
        Returns the digests unmounted. What the store is to be told, it is told another time if it does not answer.
        """
        with self._exclusive():
            kept = keep_owners() if callable(keep_owners) else keep_owners
            for owner in os.listdir(self._owners):
                if owner not in kept:
                    self.release(owner)
            used = self.uses()
            self._rediscover()
            gone = [digest for digest in list(self._mounted) if digest not in used]
            for digest in gone:
                self._unmount(digest)
        # a store that is away keeps nobody from acquiring what is mounted; the next sweep tells it
        with contextlib.suppress(SandboxFailed):
            if self.tells_store:
                self._settle()
        return gone

    def _settle(self) -> None:
        """Tell the store what is used here, and drop local copies of layers that are no more."""
        there: set[str] = set()

        def ask() -> None:
            self.holding.keep(self.held)
            there.update(self._store.layers())

        self._with_store("", ask)
        with self._exclusive():
            wanted = {digest.removeprefix("sha256:") for digest in self._held() | there}
            for file in self._local.iterdir():
                if file.name.removesuffix(".erofs") not in wanted:
                    file.unlink(missing_ok=True)

    def held(self) -> set[str]:
        """All that is used or mounted here, or is about to be."""
        with self._exclusive():
            return self._held()

    def _held(self) -> set[str]:
        self._rediscover()
        return {*self.uses(), *self._mounted}.union(*self._coming)

    def renew(self) -> None:
        """The server of packs is dead, and with it every mount that reads through it: they go, and the next ones are made anew."""
        with self._exclusive():
            self._rediscover()
            for target in self._mounted.values():
                unmount(target, lazy=True)
            self._mounted.clear()
            self._access.end(lazy=True)

    def close(self) -> None:
        """End the server of packs, unless something is mounted still."""
        with self._exclusive():
            self._rediscover()
            if not self._mounted:
                self._access.end()

    # -- mounts --------------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One at a time among this process's threads and all processes on this `run`."""
        with self._lock:
            if not self._ready:
                for folder in (self._local, self._mounts, self._owners):
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not self._ready:
                    self._rediscover()
                    self._ready = True
                yield
            finally:
                os.close(fd)

    def _rediscover(self) -> None:
        """Take over what is mounted already: an earlier process of ours did it. A mount's image names its digest."""
        self._mounted.clear()
        for mount in mounts_below(self._mounts):
            image = mounted_image(mount)
            if image is not None and image.suffix == ".erofs":
                self._mounted["sha256:" + image.stem] = Path(mount.target)

    def _local_copy(self, digest: str) -> Path:
        return self._local / f"{digest.removeprefix('sha256:')}.erofs"

    def _target(self, digest: str) -> Path:
        """The mount point; longer than usual if another layer's digest begins alike."""
        plain = digest.removeprefix("sha256:")
        taken = set(self._mounted.values())
        return next(path for path in (self._mounts / plain[:length] for length in (_SHORT, 24, 64)) if path not in taken)

    def _still_mounted(self, target: Path) -> bool:
        """Another process may have unmounted it since. A mount's root is on another device than the folder around it."""
        try:
            return os.stat(target).st_dev != os.stat(self._mounts).st_dev
        except OSError:
            return False

    def _mount(self, digest: str, fetched: set[str]) -> Path:
        if (target := self._mounted.get(digest)) is not None and self._still_mounted(target):
            return target
        self._rediscover()
        if (target := self._mounted.get(digest)) is not None:
            return target
        if digest not in fetched:  # it was mounted when we looked, and another process has unmounted it since
            self._fetch([digest])
            fetched.add(digest)
        target = self._target(digest)
        target.mkdir(exist_ok=True, mode=0o700)
        mount = partial(mount_erofs, self._local_copy(digest), self._devices(digest), target, direct_io=self._access.past_cache)
        # a mount that comes after the deadline has no owner: the next sweep finds and unmounts it
        with reading_ahead("erofs") if self._access.direct else contextlib.nullcontext():
            self._with_store(digest, mount)
        self._mounted[digest] = target
        return target

    def _fetch(self, digests: Sequence[str]) -> None:
        """Bring the metadata here and see that the data is there, before anybody is made to wait for it."""
        self._local.mkdir(parents=True, exist_ok=True, mode=0o700)
        # the store answers one question as fast as several
        self._with_store(digests[0], lambda: at_once([partial(self._verify, digest) for digest in digests], _AT_ONCE))

    def _with_store(self, digest: str, action: Callable[[], None]) -> None:
        try:
            within(self._deadline, digest, action)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise lost("", digest, str(error)) from error

    def _verify(self, digest: str) -> None:
        manifest = self._store.manifest(digest)
        try:
            self._copy_metadata(manifest)
            for use in manifest.identity.packs:
                if (flaw := self._store.packs.flaw(use)) is not None:
                    raise ValueError(flaw)
            self._access.expect(manifest.identity.packs)
        except (OSError, ValueError) as error:
            raise lost(manifest.name, digest, str(error)) from error

    def _devices(self, digest: str) -> list[Path]:
        """Where the contents that the metadata refers to are read from, in the order of its device table."""
        return [self._access.device(use.digest) for use in self._store.manifest(digest).identity.packs]

    def _copy_metadata(self, manifest: Manifest) -> None:
        """The local copy is made, or made anew where it is damaged."""
        local, expected = self._local_copy(manifest.digest), manifest.identity.metadata
        with contextlib.suppress(FileNotFoundError):
            if digest_file(local) == expected:
                return
        with self._staging.lease() as aside:
            copy_verified(self._store.folder(manifest.digest) / METADATA, local, expected, aside=aside, durable=False)

    def _unmount(self, digest: str) -> None:
        """Not lazily: overlays hold clones of the mount, which keep the file system alive but not this mount busy."""
        if (target := self._mounted.pop(digest, None)) is None:
            return
        try:
            unmount(target)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                self._mounted[digest] = target
                raise
        with contextlib.suppress(OSError):
            target.rmdir()
