"""The store of layers: files on any POSIX mount, shared by many nodes or local to one. No kernel object is made here.

    layers/<hex>/manifest.json, metadata.erofs, data.blob     published by one rename, then never written again
    tags/<name, '/' as '%'>/<tag>                             the digest that the tag means now
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
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsec.environments.durable import digest_file, sync_file, sync_folder, write_durably
from dsec.environments.leases import LeasedFolders
from dsec.environments.manifest import Identity, Manifest, decode_manifest, identity_digest
from dsec.environments.names import DEFAULT_TAG, Reference, check_digest
from libdsec.errors import NotFound, SandboxFailed

__all__ = ["DATA", "MANIFEST", "METADATA", "LayerStore"]

MANIFEST, METADATA, DATA = "manifest.json", "metadata.erofs", "data.blob"


class LayerStore:
    """Layers and tags below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.building = LeasedFolders(root / "building")
        self._manifests: dict[str, Manifest] = {}

    def prepare(self) -> None:
        """Make the folders. Readable by root alone: layers hold other people's set-uid files."""
        for folder in (self.root, self.root / "layers", self.root / "tags", self.building.root):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def settled(self, *, exclusive: bool) -> Iterator[None]:
        """Publishing and naming a layer is one step to whoever removes layers: builds share this lock, removals have it alone."""
        fd = os.open(self.root / "publish.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    def folder(self, digest: str) -> Path:
        """Where the layer's files are."""
        return self.root / "layers" / digest.removeprefix("sha256:")

    # -- tags ----------------------------------------------------------------------------------------------------------------------------

    def _tag_folder(self, name: str) -> Path:
        return self.root / "tags" / name.replace("/", "%")

    def digest_of(self, reference: Reference, *, field: str = "environment") -> str:
        """What the reference means now. NotFound if there is no such tag or layer."""
        if reference.digest is not None:
            if not self.folder(reference.digest).is_dir():
                raise NotFound(f"{field}: no layer {reference.digest} is in the store", field=field)
            return reference.digest
        try:
            text = (self._tag_folder(reference.name) / str(reference.tag)).read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{field}: no environment named {reference.name!r} with tag {reference.tag!r}", field=field) from None
        return check_digest(text.strip(), field=field)

    def set_tag(self, reference: Reference, digest: str) -> None:
        """Let the tag mean `digest` from now on."""
        folder = self._tag_folder(reference.name)
        with self.building.lease() as aside:
            while True:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                with contextlib.suppress(FileNotFoundError):  # remove_tag took the empty folder in between
                    write_durably(folder / (reference.tag or DEFAULT_TAG), digest.encode() + b"\n", aside=aside)
                    break
        sync_folder(folder.parent)

    def remove_tag(self, reference: Reference) -> bool:
        """False if it was not there (any more)."""
        folder = self._tag_folder(reference.name)
        try:
            (folder / str(reference.tag)).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        with contextlib.suppress(OSError):
            folder.rmdir()
        return True

    def tags(self) -> Iterator[tuple[Reference, str]]:
        """All tags and what they mean, by name. Those that vanish meanwhile are left out."""
        with contextlib.suppress(FileNotFoundError):
            for folder in sorted((self.root / "tags").iterdir()):
                name = folder.name.replace("%", "/")
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for file in sorted(folder.iterdir()):
                        with contextlib.suppress(FileNotFoundError):
                            yield Reference(name, tag=file.name), file.read_text().strip()

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

    def publish(
        self, folder: Path, identity: Identity, *, name: str, source: str, created_at: float, provenance: dict[str, str]
    ) -> Manifest:
        """Make the layer in `folder` (on the store's file system, holding the metadata and the data) visible, durably.

        If the layer is there already it stays, unless its files are damaged: then the new ones take its place.
        """
        digest = identity_digest(identity)
        manifest = Manifest(digest=digest, identity=identity, name=name, source=source, created_at=created_at, provenance=provenance)
        for file in (METADATA, DATA):
            sync_file(folder / file)
        write_durably(folder / MANIFEST, encode_manifest(manifest), aside=folder)
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
        sync_folder(target.parent)
        return self.manifest(digest, name=name)

    def damage(self, digest: str, *, data: bool = True) -> str | None:
        """Read the whole layer (its `data` too) and say what is wrong with it; None if nothing is."""
        folder = self.folder(digest)
        try:
            identity = decode_manifest((folder / MANIFEST).read_bytes(), digest).identity
            for file, expected in ((METADATA, identity.metadata), (DATA, identity.data)):
                if (folder / file).stat().st_size != expected.size:
                    return f"{file} has {(folder / file).stat().st_size} bytes instead of {expected.size}"
                if (data or file is METADATA) and digest_file(folder / file) != expected:
                    return f"{file} is not what its digest says"
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def _set_aside(self, digest: str) -> None:
        with self.building.lease() as away, contextlib.suppress(FileNotFoundError):
            self.folder(digest).rename(away / secrets.token_hex(4))

    def remove_layer(self, digest: str) -> None:
        """Take the layer away: at once for everybody who looks, then its bytes."""
        self._manifests.pop(digest, None)
        self._set_aside(digest)
        with contextlib.suppress(FileNotFoundError):
            sync_folder(self.root / "layers")

    def layers(self) -> set[str]:
        """Digests of all published layers, tagged or not."""
        try:
            return {f"sha256:{name}" for name in os.listdir(self.root / "layers") if len(name) == 64}
        except FileNotFoundError:
            return set()

    def bytes_free(self) -> int:
        """Of the store's file system."""
        return shutil.disk_usage(self.root).free


def encode_manifest(manifest: Manifest) -> bytes:
    """Indented: people read it."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def lost(name: str, digest: str, why: str) -> SandboxFailed:
    """The error for a layer that the store cannot give whole."""
    label = f"{name}@{digest}" if name else digest
    return SandboxFailed(f"environment: the layer {label} is lost: {why}", field="environment", cause="store-lost", ran="not-run")
