"""What of a store nothing refers to: a pure function of what lies in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dsec.environments.condemned import Thing

__all__ = ["Inventory", "LayerReferences", "find_unused"]


class LayerReferences(NamedTuple):
    """Digests that a layer cannot do without."""

    packs: frozenset[str]
    below: tuple[str, ...]


@dataclass(slots=True)
class Inventory:
    """All that lies in a store, by digest, and who refers to it."""

    layers: Mapping[str, LayerReferences | None]
    """None: the manifest cannot be read."""
    packs: Collection[str]
    roots: Collection[str]
    """Layers that tags mean, and that nodes use."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """Digest of a tar to the layer that it became."""
    traces: Collection[str] = ()
    """Layers that there are traces of."""


def find_unused(inventory: Inventory) -> tuple[set[tuple[Thing, str]], list[str]]:
    """(kind, digest) of what is not used, and layers in use that cannot be read.

    As it is not known what these refer to, no layer and no pack counts as unused while there are any. An import lives as long as something
    else uses all packs of its layer: knowing the tar then costs no more than the metadata. One without packs is read again as quickly.
    """
    living, unreadable = _living(inventory.layers, inventory.roots)
    used = _packs(inventory.layers, living)
    imported = set()
    for tar, layer in inventory.imports.items():
        references = inventory.layers.get(layer)
        if layer in living or (references is not None and not references.below and references.packs and references.packs <= used):
            imported.add(tar)
            living.add(layer)
    unused: set[tuple[Thing, str]] = {("import", tar) for tar in inventory.imports if tar not in imported}
    unused |= {("trace", layer) for layer in inventory.traces if layer not in living}
    if not unreadable:
        unused |= {("layer", layer) for layer in inventory.layers if layer not in living}
        unused |= {("pack", pack) for pack in inventory.packs if pack not in used}
    return unused, sorted(unreadable)


def _living(layers: Mapping[str, LayerReferences | None], roots: Iterable[str]) -> tuple[set[str], set[str]]:
    living: set[str] = set()
    unreadable: set[str] = set()
    waiting = list(roots)
    while waiting:
        layer = waiting.pop()
        if layer in living or layer not in layers:
            continue
        living.add(layer)
        references = layers[layer]
        if references is None:
            unreadable.add(layer)
        else:
            waiting.extend(references.below)
    return living, unreadable


def _packs(layers: Mapping[str, LayerReferences | None], living: Iterable[str]) -> set[str]:
    used: set[str] = set()
    for layer in living:
        if (references := layers[layer]) is not None:
            used |= references.packs
    return used
