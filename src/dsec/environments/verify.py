"""Reading a whole store: is every byte in it what its digest says, and if not, whose loss is it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from dsec.environments.durable import copy_verified, digest_file, write_durably
from dsec.environments.erofs import read_image
from dsec.environments.extents import Extents, decode_extents, encode_extents, measure
from dsec.environments.manifest import FileDigest, PackUse, decode_manifest
from dsec.environments.packs.index import IndexEntry, read_index
from dsec.environments.store import EXTENTS, MANIFEST, METADATA, LayerStore
from dsec.environments.trees.model import BLOCK, Pack
from libdsec.errors import DSecError, SandboxFailed

__all__ = ["BadSegment", "Damage", "VerifyReport", "verify_store"]

_WINDOW: Final = 8 << 20
_SEGMENTS: Final = 1000
"""Bad segments that are named for one pack."""


class BadSegment(msgspec.Struct, kw_only=True):
    """A stretch of a pack whose bytes are not those that its index names."""

    number: int
    offset: int
    size: int
    sha256: str
    repaired: bool = False


class Damage(msgspec.Struct, kw_only=True):
    """What is wrong with a layer, pack or tag; the layers that it concerns, and the tags that mean these."""

    what: Literal["layer", "pack", "tag"]
    name: str
    detail: str
    segments: list[BadSegment] = []
    layers: list[str] = []
    tags: list[str] = []
    repaired: bool = False


class VerifyReport(msgspec.Struct, kw_only=True):
    """What was read, and what is wrong with it."""

    layers: int = 0
    packs: int = 0
    segments: int = 0
    bytes: int = 0
    damages: list[Damage] = []

    @property
    def sound(self) -> bool:
        """Nothing is wrong, or not any more."""
        return all(damage.repaired for damage in self.damages)


Progress = Callable[[int, int], None]


def verify_store(store: LayerStore, *, repair: bool = False, copies: Path | None = None, progress: Progress | None = None) -> VerifyReport:
    """Read everything. What others publish or remove meanwhile may be left out. `progress` gets bytes done and in all.

    With `repair`, metadata come back from `copies` (a node's copies, `<hex>.erofs`) and segments from other packs that have them, in place.
    A pack for which that does not suffice is no more offered to builds: those that need its contents store them anew. SandboxFailed(
    cause="store-lost") if the store is not there.
    """
    try:
        return _Verification(store, repair, copies, progress or (lambda done, total: None)).run()
    except OSError as error:
        raise SandboxFailed(f"the store cannot be read: {error}", cause="store-lost", ran="unknown") from error


class _Verification:
    def __init__(self, store: LayerStore, repair: bool, copies: Path | None, progress: Progress) -> None:
        self.store = store
        self.repair = repair
        self.copies = copies
        self.progress = progress
        self.report = VerifyReport(damages=[])
        self.total = 0
        self.tags: dict[str, list[str]] = {}
        self.uses: dict[str, list[tuple[str, Extents | None]]] = {}
        """Of each pack, which layers refer to which of its blocks; None: not known."""

    def run(self) -> VerifyReport:
        store = self.store
        layers = sorted(store.layers())
        packs = {f"sha256:{name[:64]}" for name in os.listdir(store.packs.folder) if len(name) > 64}
        for file in store.packs.folder.glob("*.data"):
            with contextlib.suppress(FileNotFoundError):
                self.total += file.stat().st_size
        for file in store.root.glob(f"layers/*/{METADATA}"):
            with contextlib.suppress(FileNotFoundError):
                self.total += file.stat().st_size
        self._check_tags(set(layers))
        for digest in layers:
            self._check_layer(digest)
        for digest in sorted(packs | self.uses.keys()):
            self._check_pack(digest)
        return self.report

    # -- tags and layers -----------------------------------------------------------------------------------------------------------------

    def _check_tags(self, layers: set[str]) -> None:
        for reference in self.store.tags.names():
            try:
                digest = self.store.tags.history(reference)[-1].digest
            except SandboxFailed as error:
                self.report.damages.append(Damage(what="tag", name=str(reference), detail=error.message, tags=[str(reference)]))
                continue
            except DSecError:
                continue  # it was removed meanwhile
            self.tags.setdefault(digest, []).append(str(reference))
            if digest not in layers and not self.store.folder(digest).is_dir():
                detail = f"it means {digest}, which is not in the store"
                self.report.damages.append(Damage(what="tag", name=str(reference), detail=detail, layers=[digest], tags=[str(reference)]))

    def _check_layer(self, digest: str) -> None:
        folder = self.store.folder(digest)
        self.report.layers += 1
        try:
            identity = decode_manifest((folder / MANIFEST).read_bytes(), digest).identity
        except (OSError, ValueError) as error:
            if folder.is_dir():  # else it was removed meanwhile
                self._layer_damage(digest, str(error))
            return
        self._note_uses(digest, identity.packs)
        for below in identity.below:
            if not self.store.folder(below).is_dir():
                self._layer_damage(digest, f"the layer {below}, which it is a difference to, is not in the store")
        if (flaw := self._metadata_flaw(folder / METADATA, identity.metadata)) is not None and folder.is_dir():
            damage = self._layer_damage(digest, flaw)
            if self.repair and self.copies is not None:
                with contextlib.suppress(OSError, ValueError), self.store.building.lease() as aside:
                    copy = self.copies / f"{digest.removeprefix('sha256:')}.erofs"
                    copy_verified(copy, folder / METADATA, identity.metadata, aside=aside)
                    damage.repaired = True

    def _note_uses(self, digest: str, packs: list[PackUse]) -> None:
        """Extents as the metadata say; the file beside them must say the same."""
        folder = self.store.folder(digest)
        told: list[Extents] | None = None
        with contextlib.suppress(OSError, ValueError):
            told = decode_extents((folder / EXTENTS).read_bytes(), len(packs))
        true = told
        with contextlib.suppress(OSError, ValueError, KeyError):  # damage of the metadata is told elsewhere
            true, _ = measure(read_image(folder / METADATA), [Pack(use.digest, use.size) for use in packs], ())
        if (told is None or told != true) and folder.is_dir():
            damage = self._layer_damage(digest, f"{EXTENTS} is not what the metadata say")
            if self.repair and true is not None:
                with contextlib.suppress(OSError), self.store.building.lease() as aside:
                    write_durably(folder / EXTENTS, encode_extents(true), aside=aside)
                    damage.repaired = True
        for number, use in enumerate(packs):
            self.uses.setdefault(use.digest, []).append((digest, true[number] if true is not None else None))

    def _metadata_flaw(self, path: Path, expected: FileDigest) -> str | None:
        try:
            found = digest_file(path, self._step)
        except OSError as error:
            return str(error)
        return None if found == expected else f"{path.name} is not what its digest says"

    def _layer_damage(self, digest: str, detail: str) -> Damage:
        damage = Damage(what="layer", name=digest, detail=detail, layers=[digest], tags=self.tags.get(digest, []))
        self.report.damages.append(damage)
        return damage

    # -- packs ---------------------------------------------------------------------------------------------------------------------------

    def _check_pack(self, digest: str) -> None:
        packs = self.store.packs
        self.report.packs += 1
        try:
            index = read_index(packs.folder, digest)
        except (OSError, ValueError) as error:
            if digest in self.uses:
                self._pack_damage(digest, f"its index cannot be read: {error}", None)
            return
        try:
            fd = os.open(packs.data(digest), (os.O_RDWR if self.repair else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            if packs.index(digest).exists():
                self._pack_damage(digest, "its data are missing", None)
            return
        try:
            size = os.fstat(fd).st_size
            bad = list(self._bad_segments(fd, index))
            self.report.segments += len(index)
            if bad or size != index.size:
                damage = self._pack_damage(
                    digest, f"{len(bad)} of its {len(index)} segments are damaged" if bad else f"{size} bytes instead of {index.size}", bad
                )
                if self.repair:
                    self._repair(fd, index.size, digest, bad, damage)
        finally:
            os.close(fd)

    def _bad_segments(self, fd: int, index: Iterable[IndexEntry]) -> Iterator[BadSegment]:
        """One pass over the data, in large reads from the disk rather than from memory."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        window, at = b"", 0
        for number, entry in enumerate(index):
            digest = hashlib.sha256()
            offset, end = entry.start * BLOCK, entry.start * BLOCK + entry.size
            padded = -(-end // BLOCK) * BLOCK
            read, fault, padding = offset, False, b""
            while read < padded:
                if not at <= read < at + len(window):
                    try:
                        window, at = os.pread(fd, _WINDOW, read), read
                    except OSError:
                        window, at = b"", read
                    self._step(len(window))
                piece = memoryview(window)[read - at : padded - at]
                if not piece:
                    fault = True
                    break
                digest.update(piece[: max(0, end - read)])
                padding = bytes(piece[max(0, end - read) :])
                read += len(piece)
            if fault or digest.digest() != entry.digest or padding.strip(b"\0"):
                yield BadSegment(number=number, offset=offset, size=entry.size, sha256=entry.digest.hex())

    def _pack_damage(self, digest: str, detail: str, bad: list[BadSegment] | None) -> Damage:
        concerned: list[str] = []
        for layer, extents in self.uses.get(digest, []):
            if extents is None or bad is None or any(_overlap(extents, segment) for segment in bad):
                concerned.append(layer)
        tags = sorted({tag for layer in concerned for tag in self.tags.get(layer, [])})
        damage = Damage(what="pack", name=digest, detail=detail, segments=(bad or [])[:_SEGMENTS], layers=concerned, tags=tags)
        self.report.damages.append(damage)
        return damage

    def _repair(self, fd: int, size: int, pack: str, bad: list[BadSegment], damage: Damage) -> None:
        """In place: what is there is wrong, and who has the file open gets what is right."""
        os.ftruncate(fd, size)
        sources = _sources(self.store, {segment.sha256 for segment in bad}, pack)
        for segment in bad:
            for path, offset in sources.get(segment.sha256, []):
                with contextlib.suppress(OSError):
                    digest = hashlib.sha256()
                    for piece in _pieces(path, offset, segment.size):
                        digest.update(piece)
                    if digest.hexdigest() == segment.sha256:
                        _put(fd, segment, _pieces(path, offset, segment.size))
                        segment.repaired = True
                        break
        os.fsync(fd)
        damage.repaired = all(segment.repaired for segment in bad)
        if not damage.repaired:
            with self.store.settled(exclusive=False), contextlib.suppress(FileNotFoundError):
                self.store.packs.index(pack).unlink()

    def _step(self, count: int) -> None:
        self.report.bytes += count
        self.progress(self.report.bytes, self.total)


def _overlap(extents: Extents, segment: BadSegment) -> bool:
    first, last = segment.offset // BLOCK, (segment.offset + max(segment.size, 1) - 1) // BLOCK
    return any(start <= last and first < start + count for start, count in extents)


def _sources(store: LayerStore, wanted: set[str], but: str) -> dict[str, list[tuple[Path, int]]]:
    """Where else in the store these segments are."""
    found: dict[str, list[tuple[Path, int]]] = {}
    for other in sorted(store.packs.digests() - {but}) if wanted else ():
        with contextlib.suppress(OSError, ValueError):
            for entry in read_index(store.packs.folder, other):
                if entry.digest.hex() in wanted:
                    found.setdefault(entry.digest.hex(), []).append((store.packs.data(other), entry.start * BLOCK))
    return found


def _pieces(path: Path, offset: int, size: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size > 0 and (piece := file.read(min(size, _WINDOW))):
            yield piece
            size -= len(piece)


def _put(fd: int, segment: BadSegment, pieces: Iterable[bytes]) -> None:
    at = segment.offset
    for piece in pieces:
        at += os.pwrite(fd, piece, at)
    os.pwrite(fd, bytes(-at % BLOCK), at)
