"""The store of layers: files on any POSIX mount, shared by many nodes or local to one. No kernel object is made here.

    layers/<hex>/manifest.json, metadata.erofs, extents.bin   published by one rename, then never written again
    packs/<hex>.data, <hex>.index                             the contents of files (see dsec.environments.packs)
    tags/<name, '/' as '%'>/<tag>                             what the tag means now, and what it meant
    imports/<hex>                                             the layer that an image's layer with that tar digest became
    traces/<hex>.json                                         what was read of a layer, in what order
    holders/<node>/                                           the layers that a node uses
    condemned/                                                what a collection of garbage found unused, and since when
    building/                                                 leased folders of builds under way

Node-local caches of manifests are safe, as a digest means the same for ever; tags are read each time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dsec.environments.condemned import Condemned
from dsec.environments.durable import digest_file, sync_file, sync_folder, write_durably
from dsec.environments.leases import LeasedFolders
from dsec.environments.manifest import FileDigest, Manifest, decode_manifest, encode_manifest
from dsec.environments.names import Reference
from dsec.environments.packs.known import ContentsLost
from dsec.environments.packs.shelf import PackShelf
from dsec.environments.tags import Tags
from libdsec.errors import NotFound, SandboxFailed

__all__ = ["EXTENTS", "MANIFEST", "METADATA", "LayerStore", "lost"]

MANIFEST, METADATA, EXTENTS = "manifest.json", "metadata.erofs", "extents.bin"


class LayerStore:
    """What is below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.building = LeasedFolders(root / "building")
        self.packs = PackShelf(root / "packs")
        self.tags = Tags(root / "tags", root / "tags.lock", self.building)
        self.condemned = Condemned(root / "condemned")
        self._manifests: dict[str, Manifest] = {}

    def prepare(self) -> None:
        """Make the folders. Readable by root alone: layers hold other people's set-uid files."""
        for name in ("", "layers", "packs", "tags", "imports", "traces", "holders", "condemned", "building"):
            (self.root / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def settled(self, *, exclusive: bool) -> Iterator[None]:
        """Publishing and naming a layer is one step to whoever removes layers: who refers shares this lock, removals have it alone."""
        path = self.root / "publish.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if exclusive or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    def folder(self, digest: str) -> Path:
        """Where the layer's files are."""
        return self.root / "layers" / digest.removeprefix("sha256:")

    # -- names ---------------------------------------------------------------------------------------------------------------------------

    def digest_of(self, reference: Reference, *, field: str = "environment") -> str:
        """What the reference means now. NotFound if there is no such tag or layer.

        SandboxFailed(cause="store-lost") for a damaged tag, or a store that is away: where it should be there is no store, or no answer.
        """
        try:
            if reference.digest is None:
                return self.tags.current(reference, field=field)
            os.stat(self.folder(reference.digest))
        except FileNotFoundError:
            self._require(field)
            raise NotFound(f"{field}: no layer {reference.digest} is in the store", field=field) from None
        except NotFound:
            self._require(field)
            raise
        except OSError as error:
            raise SandboxFailed(f"{field}: the store cannot be read: {error}", field=field, cause="store-lost", ran="not-run") from error
        return reference.digest

    def _require(self, field: str) -> None:
        """Nobody must take an empty mount point for a store without names. One that was never prepared has no folder at all."""
        if self.root.is_dir() and not (self.root / "tags").is_dir():
            why = f"{field}: {self.root} is no store, or its file system is not mounted"
            raise SandboxFailed(why, field=field, cause="store-lost", ran="not-run")

    def set_tag(self, reference: Reference, digest: str) -> None:
        """Let the tag mean a layer that is here. The caller holds `settled`, since before it made sure that the layer is here."""
        self.refer(digest)
        self.tags.put(reference, digest)

    def refer(self, digest: str) -> None:
        """Something will refer to the layer: no removal under way may take it, nor what it needs. The caller holds `settled`."""
        if not self.condemned.any():
            return
        manifest = self.manifest(digest)
        self.condemned.pardon("layer", digest)
        for use in manifest.identity.packs:
            self.condemned.pardon("pack", use.digest)
        for below in manifest.identity.below:
            self.refer(below)

    # -- layers --------------------------------------------------------------------------------------------------------------------------

    def manifest(self, digest: str, *, name: str = "") -> Manifest:
        """The layer's manifest, proved against its digest. SandboxFailed(cause="store-lost") if it is missing or damaged."""
        if (known := self._manifests.get(digest)) is not None:
            return known
        try:
            manifest = decode_manifest((self.folder(digest) / MANIFEST).read_bytes(), digest)
        except (OSError, ValueError) as error:
            raise lost(name, digest, str(error)) from error
        self._manifests[digest] = manifest
        return manifest

    def seal(self, folder: Path, manifest: Manifest) -> None:
        """Make the layer in `folder` (on the store's file system, holding the metadata) whole and durable; `publish` then only renames."""
        for file in sorted(folder.iterdir()):
            sync_file(file)
        write_durably(folder / MANIFEST, encode_manifest(manifest), aside=folder)

    def publish(self, folder: Path, manifest: Manifest) -> Manifest:
        """Make the sealed layer in `folder` visible; `sync_layers` makes that last. The caller holds `settled`.

        All that it refers to is here: else ContentsLost, and nothing is visible. If the layer is here already it stays, unless it
        is damaged.
        """
        digest = manifest.digest
        with self.building.lease() as aside:
            for use in manifest.identity.packs:
                self.packs.require(use, aside=aside)
        for below in manifest.identity.below:
            if not self.folder(below).is_dir():
                raise ContentsLost(f"the layer {below} has been removed")
        target = self.folder(digest)
        self._manifests.pop(digest, None)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if self.damage(digest) is not None:
                self._set_aside(digest)
                folder.rename(target)
        self.refer(digest)
        return self.manifest(digest)

    def sync_layers(self) -> None:
        """What was published stays after a crash of the host."""
        sync_folder(self.root / "layers")

    def damage(self, digest: str) -> str | None:
        """Say what is wrong with the layer, None if nothing is. Of its packs it is only seen that they are there, and how long."""
        folder = self.folder(digest)
        try:
            identity = decode_manifest((folder / MANIFEST).read_bytes(), digest).identity
            if (flaw := _flaw(folder / METADATA, identity.metadata)) is not None:
                return flaw
            for use in identity.packs:
                if (flaw := self.packs.flaw(use)) is not None:
                    return flaw
                if not self.packs.index(use.digest).exists():
                    return f"the pack {use.digest} is known to be damaged"
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _set_aside(self, digest: str) -> None:
        with self.building.lease() as away, contextlib.suppress(FileNotFoundError):
            self.folder(digest).rename(away / secrets.token_hex(4))

    def forget(self, digest: str) -> None:
        """Do not answer for the layer from memory any more."""
        self._manifests.pop(digest, None)

    def layers(self) -> set[str]:
        """Digests of all published layers, tagged or not."""
        try:
            return {f"sha256:{name}" for name in os.listdir(self.root / "layers") if len(name) == 64}
        except FileNotFoundError:
            return set()

    def now(self) -> float:
        """The time by the clock that the store's times of change are by; this machine's where nothing may be written, or no store is."""
        if not self.building.root.is_dir():
            return time.time()
        try:
            with self.building.lease() as folder:
                return folder.stat().st_mtime
        except OSError:
            return time.time()

    def bytes_free(self) -> int:
        """Of the store's file system."""
        return shutil.disk_usage(self.root).free


def _flaw(path: Path, expected: FileDigest) -> str | None:
    if (size := path.stat().st_size) != expected.size:
        return f"{path.name} has {size} bytes instead of {expected.size}"
    return None if digest_file(path) == expected else f"{path.name} is not what its digest says"


def lost(name: str, digest: str, why: str) -> SandboxFailed:
    """The error for a layer that the store cannot give whole."""
    label = f"{name}@{digest}" if name else digest
    return SandboxFailed(f"environment: the layer {label} is lost: {why}", field="environment", cause="store-lost", ran="not-run")
