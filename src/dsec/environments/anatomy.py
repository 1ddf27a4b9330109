"""What an environment is made of: its layers, what they share with others, and what of them is in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import msgspec

from dsec.environments.environment import EnvironmentStore
from dsec.environments.extents import Extents, blocks_of, decode_extents, joined
from dsec.environments.manifest import Kind, Manifest
from dsec.environments.names import check_digest, parse_reference
from dsec.environments.store import EXTENTS, LayerStore
from dsec.environments.traces import load_trace
from dsec.environments.trees import BLOCK
from dsec.kernel.pagecache import cached_pages
from libdsec.errors import DSecError

__all__ = ["LayerPart", "SourceLayer", "dissect"]


class SourceLayer(msgspec.Struct, kw_only=True):
    """A layer of the image that a layer came from."""

    diff_id: str
    """Digest of its tar."""
    digest: str = ""
    """The layer that it became; empty if that has been removed since."""
    files: int = 0
    data_bytes: int = 0


class LayerPart(msgspec.Struct, kw_only=True):
    """One layer of an environment."""

    digest: str
    name: str
    kind: Kind
    source: str
    created_at: float
    files: int
    logical_bytes: int
    metadata_bytes: int
    data_bytes: int
    packs: int
    shared_bytes: int
    """Of `data_bytes`, what other named environments refer to as well."""
    cached_bytes: int | None = None
    """Of `data_bytes`, what is in this machine's page cache, as far as the store's file system can say."""
    traced_bytes: int | None = None
    """Of `data_bytes`, what the recorded trace of the environment says was read; None if there is none."""
    made_of: list[SourceLayer] = []
    """From the bottom."""


def dissect(store: EnvironmentStore, names: Sequence[str]) -> list[LayerPart]:
    """The layers that the references bring, from the bottom. Errors as of `EnvironmentStore.resolve` for what is not there."""
    layers = store.layers
    stack: list[str] = []
    for name in names:
        reference = parse_reference(name, field="name")
        digest = layers.digest_of(reference, field="name")
        for part in (*layers.manifest(digest, name=reference.name).identity.below, digest):
            if part not in stack:
                stack.append(part)
    others = _others(layers, stack)
    read = _read(layers, stack)
    return [_part(layers, layers.manifest(digest), others, read) for digest in stack]


def _part(layers: LayerStore, manifest: Manifest, others: dict[str, Extents], read: dict[str, Extents] | None) -> LayerPart:
    identity, contents = manifest.identity, manifest.contents
    extents = _extents(layers, manifest)
    shared = sum(_common(own, others.get(pack, [])) for pack, own in extents.items())
    return LayerPart(
        digest=manifest.digest,
        name=manifest.name,
        kind=identity.kind,
        source=manifest.source,
        created_at=manifest.created_at,
        files=contents.files,
        logical_bytes=contents.logical_bytes,
        metadata_bytes=identity.metadata.size,
        data_bytes=contents.data_bytes,
        packs=len(identity.packs),
        shared_bytes=shared * BLOCK,
        cached_bytes=_cached(layers, extents),
        traced_bytes=None if read is None else BLOCK * sum(_common(own, read.get(pack, [])) for pack, own in extents.items()),
        made_of=[_source_layer(layers, diff_id) for diff_id in manifest.provenance.get("diff_ids", "").split()]
        if not identity.below
        else [],
    )


def _source_layer(layers: LayerStore, diff_id: str) -> SourceLayer:
    with contextlib.suppress(OSError, DSecError):
        digest = check_digest((layers.root / "imports" / check_digest(diff_id).removeprefix("sha256:")).read_text().strip())
        contents = layers.manifest(digest).contents
        return SourceLayer(diff_id=diff_id, digest=digest, files=contents.files, data_bytes=contents.data_bytes)
    return SourceLayer(diff_id=diff_id)


def _extents(layers: LayerStore, manifest: Manifest) -> dict[str, Extents]:
    """By pack. Nothing for a layer of the older format, or whose list is lost."""
    packs = manifest.identity.packs
    with contextlib.suppress(OSError, ValueError):
        found = decode_extents((layers.folder(manifest.digest) / EXTENTS).read_bytes(), len(packs))
        return {use.digest: extents for use, extents in zip(packs, found, strict=True)}
    return {}


def _others(layers: LayerStore, stack: Sequence[str]) -> dict[str, Extents]:
    """What layers of other environments refer to in the packs of these."""
    wanted = {use.digest for digest in stack for use in layers.manifest(digest).identity.packs}
    found: dict[str, list[tuple[int, int]]] = {}
    seen = set(stack)
    waiting = [digest for _, digest in layers.tags.all()]
    while waiting:
        digest = waiting.pop()
        if digest in seen:
            continue
        seen.add(digest)
        with contextlib.suppress(DSecError):
            manifest = layers.manifest(digest)
            waiting.extend(manifest.identity.below)
            if any(use.digest in wanted for use in manifest.identity.packs):
                for pack, extents in _extents(layers, manifest).items():
                    if pack in wanted:
                        found.setdefault(pack, []).extend(extents)
    return {pack: joined(extents) for pack, extents in found.items()}


def _read(layers: LayerStore, stack: Sequence[str]) -> dict[str, Extents] | None:
    """By pack, the blocks that the traces of these layers name; None if there are no traces."""
    found: dict[str, list[tuple[int, int]]] | None = None
    for digest in stack:
        if (trace := load_trace(layers, digest)) is not None:
            found = {} if found is None else found
            for read in trace.reads:
                first = read.offset // BLOCK
                found.setdefault(read.pack, []).append((first, -(-(read.offset + read.length) // BLOCK) - first))
    return None if found is None else {pack: joined(extents) for pack, extents in found.items()}


def _common(one: Extents, other: Extents) -> int:
    """Blocks that are in both."""
    return blocks_of(one) + blocks_of(other) - blocks_of(joined([*one, *other])) if other else 0


def _cached(layers: LayerStore, extents: dict[str, Extents]) -> int | None:
    total = 0
    for pack, own in extents.items():
        try:
            fd = os.open(layers.packs.data(pack), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            pages = cached_pages(fd, ((start * BLOCK, count * BLOCK) for start, count in own))
        finally:
            os.close(fd)
        if pages is None:
            return None
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total
