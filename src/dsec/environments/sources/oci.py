"""Images as containers ship them: each layer becomes a tree, read once for all images that have it; then they are laid over each other.

Nothing is taken on trust: each layer's tar stream must have the digest that the image's configuration names. That is known when the stream
ends, and nothing of it is kept if it has another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsec.environments.manifest import Configuration
from dsec.environments.sources.archives import read_layer
from dsec.environments.sources.blobs import Blobs, opened_image
from dsec.environments.sources.furnishing import add_folder
from dsec.environments.sources.grounding import ground
from dsec.environments.sources.imagefiles import ImageLayer, find_image
from dsec.environments.sources.refusals import damaged
from dsec.environments.sources.settings import configuration_of, read_settings
from dsec.environments.sources.streams import decompressed
from dsec.environments.sources.view import View
from dsec.environments.sources.workbench import Workbench
from dsec.environments.trees import Node

__all__ = ["ImageContents", "Progress", "read_image"]

Progress = Callable[[int, int, int, int], None]
"""Told of bytes done, bytes in all (0 if not known), the number of the layer from 1 and that of all layers (0 if there are none)."""


@dataclass(frozen=True, slots=True)
class ImageContents:
    """Trees from the bottom, as overlayfs can lay them over each other, and what the image says of itself."""

    trees: list[Node]
    configuration: Configuration
    provenance: dict[str, str]


def read_image(path: Path, wanted: str, bench: Workbench, progress: Progress) -> ImageContents:
    """The image at `path`, an OCI layout or a docker archive, in a folder or a tar; see `find_image` for `wanted`."""
    with opened_image(path, bench.scratch, lambda done, total: progress(done, total, 0, 0)) as blobs:
        image = find_image(blobs, wanted)
        settings = read_settings(image.settings.get("config"))
        raw: list[Node] = []
        known = 0
        count = len(image.layers)
        last = ""
        for number, layer in enumerate(image.layers, 1):
            progress(0, 0, number, count)
            if layer.diff_id == last:  # laid over itself it changes nothing
                known += 1
                continue
            last = layer.diff_id
            tree = bench.imported(layer.diff_id)
            if tree is None:
                tree = _read(blobs, layer, bench, partial(_tell, progress, number, count))
                bench.keep_import(layer.diff_id, tree)
            else:
                known += 1
            raw.append(tree)
    bench.publish_imports()
    trees: list[Node] = []
    for tree in raw:
        trees.append(ground(tree, View(trees) if trees else None))
    if trees:
        for folder in settings.folders:
            add_folder(trees, folder)
    provenance = {"image": image.digest, "layers": str(len(image.layers)), "layers_known": str(known)}
    provenance["diff_ids"] = " ".join(layer.diff_id for layer in image.layers)
    if image.manifest:
        provenance["image_manifest"] = image.manifest
    return ImageContents(trees, configuration_of(settings), provenance)


def _tell(progress: Progress, number: int, count: int, done: int, total: int) -> None:
    progress(done, total, number, count)


def _read(blobs: Blobs, layer: ImageLayer, bench: Workbench, progress: Callable[[int, int], None]) -> Node:
    with blobs.opened(layer.blob) as extent, decompressed(extent, progress) as stream:
        tree, found = read_layer(stream, bench.add, bench.budget)
    if layer.diff_id != f"sha256:{found}":
        raise damaged(f"a layer has the digest sha256:{found} instead of {layer.diff_id:.100}")
    return tree
