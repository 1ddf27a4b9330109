"""What lies in a store and who uses it: bytes that a layer has for itself, that it shares, that a pack holds for nobody."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dsec.environments.extents import Extents, decode_extents
from dsec.environments.holders import holdings
from dsec.environments.manifest import COUNTED, Kind, Manifest
from dsec.environments.store import EXTENTS, LayerStore
from dsec.environments.trees.model import BLOCK
from libdsec.errors import DSecError, SandboxFailed

__all__ = ["LayerReport", "PackReport", "StoreReport", "report_store"]


class LayerReport(msgspec.Struct, kw_only=True):
    """One layer. `own_bytes` are in blocks that no other layer refers to; `shared_bytes` others refer to as well."""

    digest: str
    name: str = ""
    kind: Kind | None = None
    files: int = 0
    logical_bytes: int = 0
    metadata_bytes: int = 0
    own_bytes: int = 0
    shared_bytes: int = 0
    packs: int = 0
    tags: list[str] = []
    above: list[str] = []
    """Layers that are a difference to it."""
    nodes: list[str] = []
    """Nodes that have it mounted or in use."""
    imported: bool = False
    """Known as a layer of an image."""
    damage: str = ""

    @property
    def used(self) -> bool:
        """Whether anything but an import refers to it directly."""
        return bool(self.tags or self.above or self.nodes)


class PackReport(msgspec.Struct, kw_only=True):
    """One pack: `dead_bytes` no layer refers to; they go with the pack."""

    digest: str
    bytes: int = 0
    referenced_bytes: int = 0
    dead_bytes: int = 0
    layers: int = 0


class StoreReport(msgspec.Struct, kw_only=True):
    """All of a store. `ratio` is how often, on average, what is stored is used: contents of all layers by bytes in packs."""

    root: str
    layers: list[LayerReport]
    packs: list[PackReport]
    logical_bytes: int = 0
    data_bytes: int = 0
    """Contents of all layers, what they share counted for each."""
    metadata_bytes: int = 0
    pack_bytes: int = 0
    referenced_bytes: int = 0
    dead_bytes: int = 0
    free_bytes: int = 0
    ratio: float = 0.0


def report_store(store: LayerStore, *, now: float, silent_seconds: float) -> StoreReport:
    """Read all manifests and lists of extents; no metadata and no contents. SandboxFailed(cause="store-lost") if the store is not there.

    Damaged layers are told of, what they refer to is not known.
    """
    try:
        return _report(store, now, silent_seconds)
    except OSError as error:
        raise SandboxFailed(f"the store cannot be read: {error}", cause="store-lost", ran="not-run") from error


def _report(store: LayerStore, now: float, silent_seconds: float) -> StoreReport:
    layers: dict[str, LayerReport] = {}
    uses: dict[str, list[tuple[str, Extents]]] = defaultdict(list)
    above: list[tuple[str, str]] = []
    for digest in sorted(store.layers()):
        layer = layers[digest] = LayerReport(digest=digest, tags=[], above=[], nodes=[])
        try:
            manifest = store.manifest(digest)
            _describe(layer, manifest)
            above += [(below, digest) for below in manifest.identity.below]
            data = (store.folder(digest) / EXTENTS).read_bytes()
            extents = decode_extents(data, len(manifest.identity.packs))
        except (DSecError, OSError, ValueError) as error:
            layer.damage = str(error)
            continue
        for use, each in zip(manifest.identity.packs, extents, strict=True):
            uses[use.digest].append((digest, each))
    for below, digest in above:
        if below in layers:
            layers[below].above.append(digest)
    _tell_users(store, layers, now, silent_seconds)
    packs = [_share(digest, _size(store.packs.data(digest)), uses.get(digest, ()), layers) for digest in sorted(store.packs.digests())]
    pack_bytes = sum(pack.bytes for pack in packs)
    data_bytes = sum(layer.own_bytes + layer.shared_bytes for layer in layers.values())
    return StoreReport(
        root=str(store.root),
        layers=sorted(layers.values(), key=lambda layer: (not layer.tags, layer.tags, layer.name, layer.digest)),
        packs=packs,
        logical_bytes=min(COUNTED, sum(layer.logical_bytes for layer in layers.values())),
        data_bytes=data_bytes,
        metadata_bytes=sum(layer.metadata_bytes for layer in layers.values()),
        pack_bytes=pack_bytes,
        referenced_bytes=sum(pack.referenced_bytes for pack in packs),
        dead_bytes=sum(pack.dead_bytes for pack in packs),
        free_bytes=store.bytes_free(),
        ratio=round(data_bytes / pack_bytes, 3) if pack_bytes else 0.0,
    )


def _describe(layer: LayerReport, manifest: Manifest) -> None:
    layer.name, layer.kind = manifest.name, manifest.identity.kind
    layer.files, layer.logical_bytes = manifest.contents.files, manifest.contents.logical_bytes
    layer.metadata_bytes, layer.packs = manifest.identity.metadata.size, len(manifest.identity.packs)


def _tell_users(store: LayerStore, layers: Mapping[str, LayerReport], now: float, silent_seconds: float) -> None:
    for reference, digest in store.tags.all():
        if digest in layers:
            layers[digest].tags.append(str(reference))
    for holder in holdings(store, now=now, silent_seconds=silent_seconds):
        for digest in holder.digests & layers.keys():
            layers[digest].nodes.append(holder.name or holder.node)
    for name in os.listdir(store.root / "imports"):
        with contextlib.suppress(FileNotFoundError):
            digest = (store.root / "imports" / name).read_text(errors="replace").strip()
            if digest in layers:
                layers[digest].imported = True


def _share(digest: str, size: int, uses: Sequence[tuple[str, Extents]], layers: Mapping[str, LayerReport]) -> PackReport:
    """Give each layer its part of a pack: along the blocks, with the layers that refer to each stretch."""
    edges: list[tuple[int, bool, str]] = []
    for layer, extents in uses:
        for start, count in extents:
            edges.append((start, True, layer))
            edges.append((start + count, False, layer))
    edges.sort()
    users: set[str] = set()
    own: dict[str, int] = defaultdict(int)
    referenced = last = 0
    for at, begins, layer in edges:
        length = (at - last) * BLOCK
        if users and length:
            referenced += length
            if len(users) == 1:
                [user] = users
                own[user] += length
        last = at
        if begins:
            users.add(layer)
        else:
            users.discard(layer)
    for layer, extents in uses:
        layers[layer].own_bytes += own[layer]
        layers[layer].shared_bytes += sum(count for _, count in extents) * BLOCK - own[layer]
    return PackReport(digest=digest, bytes=size, referenced_bytes=referenced, dead_bytes=max(0, size - referenced), layers=len(uses))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
