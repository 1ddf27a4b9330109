"""Which image a layout or an archive holds for this machine: an OCI layout, or what `docker save` writes (which may be both)."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dsec.environments.names import check_digest
from dsec.environments.sources.blobs import Blobs, document
from dsec.environments.sources.refusals import damaged
from libdsec.errors import InvalidArgument, NotFound

__all__ = ["INDEXES", "Image", "ImageLayer", "blob_path", "find_image", "machine_architecture", "proper_digest"]

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
_NAMES: Final = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_OCI, _DOCKER = "application/vnd.oci.image.", "application/vnd.docker."
_LAYERS: Final = frozenset(
    (
        *(f"{_OCI}layer.v1.tar{how}" for how in ("", "+gzip", "+zstd")),
        *(f"{_DOCKER}image.rootfs.diff.tar{how}" for how in ("", ".gzip", ".zstd")),
    )
)
_FOREIGN: Final = frozenset(
    (
        *(f"{_OCI}layer.nondistributable.v1.tar{how}" for how in ("", "+gzip", "+zstd")),
        *(f"{_DOCKER}image.rootfs.foreign.diff.tar{how}" for how in ("", ".gzip")),
    )
)
_CONFIGURATIONS: Final = frozenset((f"{_OCI}config.v1+json", f"{_DOCKER}container.image.v1+json"))
INDEXES: Final = frozenset((f"{_OCI}index.v1+json", f"{_DOCKER}distribution.manifest.list.v2+json"))
"""Media types of lists of images."""

_MANIFESTS: Final = frozenset((f"{_OCI}manifest.v1+json", f"{_DOCKER}distribution.manifest.v2+json"))


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """The file that it is in, and the digest of its tar stream, `sha256:<hex>`."""

    blob: str
    diff_id: str


@dataclass(frozen=True, slots=True)
class Image:
    """Layers from the bottom; `settings` is the image's configuration, and `digest` that of its text."""

    layers: list[ImageLayer]
    settings: dict[str, Any]
    digest: str
    manifest: str = ""
    """Digest of its manifest, where there is one."""


def machine_architecture() -> str:
    """This machine's, as images name it."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def find_image(blobs: Blobs, wanted: str) -> Image:
    """`wanted` chooses by tag or manifest digest where there are several images; empty: the only one for this machine.

    Raises InvalidArgument for what is no image, is none that can be read here, or leaves a choice; NotFound if nothing fits.
    """
    try:
        return _from_layout(blobs, wanted) if blobs.holds("index.json") else _from_docker(blobs, wanted)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise damaged(f"its documents lack something: {type(error).__name__} {error}") from error


def _from_layout(blobs: Blobs, wanted: str) -> Image:
    candidates = list(_manifests(blobs, document(blobs, "index.json")["manifests"], wanted, depth=0))
    machine = machine_architecture()
    fitting = [one for one in candidates if _platform(one) in (None, ("linux", machine))]
    named = f" named {wanted!r}" if wanted else ""
    if not fitting:
        others = sorted({"/".join(found) for one in candidates if (found := _platform(one)) is not None and found[0] != "unknown"})
        raise NotFound(
            f"source: the image has nothing for linux/{machine}{named}" + (f", only for {', '.join(others)}" if others else ""),
            field="source",
        )
    names = {one["digest"] for one in fitting}
    if len(names) > 1:
        raise InvalidArgument(f"source: several images are there; add @TAG or @DIGEST, one of {_choices(fitting)}", field="source")
    chosen = fitting[0]["digest"]
    manifest = document(blobs, blob_path(chosen), chosen)
    kind = manifest["config"].get("mediaType", "")
    if kind and kind not in _CONFIGURATIONS:
        raise InvalidArgument(f"source: what is there is no container image but {kind!r:.200}", field="source", cause="archive")
    digest = manifest["config"]["digest"]
    settings = document(blobs, blob_path(digest), digest)
    if (found := settings.get("architecture")) and (settings.get("os") or "linux", found) != ("linux", machine):
        raise NotFound(f"source: the image is for {settings.get('os')}/{found}, not for linux/{machine}", field="source")
    for layer in manifest["layers"]:
        _check_layer(blobs, layer)
    return Image(_pair([blob_path(layer["digest"]) for layer in manifest["layers"]], settings), settings, digest, chosen)


def _check_layer(blobs: Blobs, layer: dict[str, Any]) -> None:
    kind = layer.get("mediaType", "")
    if kind in _FOREIGN and not blobs.holds(blob_path(layer["digest"])):
        raise InvalidArgument(
            f"source: the layer {layer['digest']} is foreign ({kind}): it is to be fetched from elsewhere, and is not in the image",
            field="source",
            cause="archive",
        )
    if kind and kind not in _LAYERS and kind not in _FOREIGN:
        raise InvalidArgument(
            f"source: the layer {layer['digest']} is of the type {kind!r:.200}, which is not known here", field="source", cause="archive"
        )


def _choices(fitting: list[dict[str, Any]]) -> list[str]:
    return sorted({next(iter(_known_as(one)), one["digest"]) for one in fitting})


def _known_as(descriptor: dict[str, Any]) -> list[str]:
    annotations = descriptor.get("annotations") or {}
    return [annotations[name] for name in _NAMES if annotations.get(name)]


def _platform(descriptor: dict[str, Any]) -> tuple[str, str] | None:
    found = descriptor.get("platform")
    return (str(found.get("os")), str(found.get("architecture"))) if found else None


def _manifests(blobs: Blobs, descriptors: list[dict[str, Any]], wanted: str, depth: int) -> Iterator[dict[str, Any]]:
    """Descriptors of single images, through indexes within indexes. What is neither is left out: signatures, attestations."""
    if depth > 4:
        raise damaged("indexes lie too deep in one another")
    for descriptor in descriptors:
        if wanted and depth == 0 and wanted not in (*_known_as(descriptor), descriptor["digest"]):
            continue
        if descriptor["mediaType"] in INDEXES:
            inner = document(blobs, blob_path(descriptor["digest"]), descriptor["digest"])
            yield from _manifests(blobs, inner["manifests"], wanted, depth + 1)
        elif descriptor["mediaType"] in _MANIFESTS:
            yield descriptor


def _from_docker(blobs: Blobs, wanted: str) -> Image:
    images = [one for one in document(blobs, "manifest.json") if not wanted or wanted in (one.get("RepoTags") or [])]
    if len(images) != 1:
        raise InvalidArgument(f"source: {len(images)} images" + (f" named {wanted!r}" if wanted else "") + " are there", field="source")
    name, layers = images[0]["Config"], images[0]["Layers"]
    if not isinstance(name, str) or not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        raise damaged("the names of its files are none")
    settings = document(blobs, name)
    with blobs.opened(name) as extent:
        digest = "sha256:" + hashlib.sha256(extent.read()).hexdigest()
    return Image(_pair(layers, settings), settings, digest)


def proper_digest(text: Any) -> str:
    """What a stranger's document gives as a digest, if it is one: it becomes names of files."""
    try:
        return check_digest(str(text))
    except InvalidArgument:
        raise damaged(f"{text!r:.100} is no digest that we know") from None


def blob_path(digest: Any) -> str:
    """Where a layout has the blob."""
    return f"blobs/sha256/{proper_digest(digest).removeprefix('sha256:')}"


def _pair(blobs: list[str], settings: dict[str, Any]) -> list[ImageLayer]:
    diff_ids: list[str] = settings["rootfs"]["diff_ids"]
    if len(blobs) != len(diff_ids):
        raise damaged(f"it has {len(blobs)} layers and {len(diff_ids)} digests for them")
    return [ImageLayer(blob, proper_digest(diff_id)) for blob, diff_id in zip(blobs, diff_ids, strict=True)]
