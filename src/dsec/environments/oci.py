"""Images as containers ship them: an OCI layout (folder or tar) or a docker archive, applied layer by layer into one tree.

One tree rather than one of our layers for each of theirs: most are small, and a sandbox's look-up in an overlay costs by depth. Nothing
is taken on trust: each layer's tar stream must have the digest that the image's configuration names.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.environments.archives import members, unpack_member, unpack_tar
from dsec.environments.manifest import Configuration
from dsec.environments.streams import ForwardReader, damaged, decompressed
from dsec.environments.tree import RootedTree
from dsec.kernel.paths import open_in
from libdsec.errors import InvalidArgument, NotFound

__all__ = ["apply_image"]

_OPAQUE: Final = ".wh..wh..opq"
_WHITEOUT: Final = ".wh."
_AUFS: Final = ".wh..wh."
_DOCUMENT_LIMIT: Final = 16 << 20
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Image:
    """Paths of blobs below the image's folder, from the bottom, each with the digest of its tar stream."""

    layers: list[tuple[str, str]]
    settings: dict[str, Any]
    digest: str


def apply_image(
    path: Path, wanted: str, tree: RootedTree, destination: str, *, work: Path, progress: Progress
) -> tuple[Configuration, str]:
    """Fill the tree; returns the image's settings and its configuration's digest.

    `wanted` chooses by tag or manifest digest where there are several images; empty: the only one for this machine.
    """
    if not path.is_dir():
        unpacked = work / "image"
        unpacked.mkdir()
        with RootedTree(unpacked) as folder, _reading(path) as fd, decompressed(fd, progress) as stream:
            unpack_tar(stream, folder, "/", own=(0, 0))
        path = unpacked
    root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        image = _find_image(root, wanted)
        for blob, diff_id in image.layers:
            with _blob(root, blob) as fd:
                _apply_layer(fd, diff_id, tree, destination, progress)
    finally:
        os.close(root)
    return _configuration(image.settings), image.digest


# -- finding the image ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _blob(root: int, name: str) -> Iterator[int]:
    try:
        fd = open_in(root, name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise damaged(f"{name!r:.200} is missing from the image: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _read(root: int, name: str) -> bytes:
    with _blob(root, name) as fd:
        return os.pread(fd, _DOCUMENT_LIMIT, 0)


def _document(root: int, name: str, digest: str | None = None) -> Any:
    data = _read(root, name)
    if digest is not None and digest != "sha256:" + hashlib.sha256(data).hexdigest():
        raise damaged(f"{name} is not what its digest says")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(f"{name} is no JSON: {error}") from error


def _blob_path(digest: Any) -> str:
    algorithm, _, value = str(digest).partition(":")
    if algorithm != "sha256" or len(value) != 64 or not value.isalnum():
        raise damaged(f"{digest!r:.100} is no digest that we know")
    return f"blobs/sha256/{value}"


def _find_image(root: int, wanted: str) -> _Image:
    try:
        if "index.json" in os.listdir(f"/proc/self/fd/{root}"):
            return _from_layout(root, wanted)
        return _from_docker(root, wanted)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise damaged(f"its documents lack something: {type(error).__name__} {error}") from error


def _from_layout(root: int, wanted: str) -> _Image:
    candidates: list[dict[str, Any]] = list(_manifests(root, _document(root, "index.json")["manifests"], wanted, depth=0))
    machine = _ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting = [one for one in candidates if _platform(one) in (None, ("linux", machine))]
    names = {one["digest"] for one in fitting}
    if not fitting:
        raise NotFound(f"source: the image has nothing for linux/{machine}" + (f" named {wanted!r}" if wanted else ""), field="source")
    if len(names) > 1:
        raise InvalidArgument(f"source: several images are there; add @TAG or @DIGEST, one of {sorted(names)}", field="source")
    chosen = fitting[0]["digest"]
    manifest = _document(root, _blob_path(chosen), chosen)
    digest = manifest["config"]["digest"]
    settings = _document(root, _blob_path(digest), digest)
    return _Image(_pair([_blob_path(layer["digest"]) for layer in manifest["layers"]], settings), settings, digest)


def _platform(descriptor: dict[str, Any]) -> tuple[str, str] | None:
    found = descriptor.get("platform")
    return (str(found.get("os")), str(found.get("architecture"))) if found else None


def _manifests(root: int, descriptors: list[dict[str, Any]], wanted: str, depth: int) -> Iterator[dict[str, Any]]:
    """Descriptors of single images, through indexes within indexes."""
    if depth > 4:
        raise damaged("indexes lie too deep in one another")
    for descriptor in descriptors:
        known = (descriptor.get("annotations") or {}).get("org.opencontainers.image.ref.name")
        if wanted and depth == 0 and wanted not in (known, descriptor["digest"]):
            continue
        if "index" in descriptor["mediaType"] or "manifest.list" in descriptor["mediaType"]:
            inner = _document(root, _blob_path(descriptor["digest"]), descriptor["digest"])
            yield from _manifests(root, inner["manifests"], wanted, depth + 1)
        elif "manifest" in descriptor["mediaType"]:
            yield descriptor


def _from_docker(root: int, wanted: str) -> _Image:
    images = [one for one in _document(root, "manifest.json") if not wanted or wanted in (one.get("RepoTags") or [])]
    if len(images) != 1:
        raise InvalidArgument(f"source: {len(images)} images" + (f" named {wanted!r}" if wanted else "") + " are there", field="source")
    digest = "sha256:" + hashlib.sha256(_read(root, images[0]["Config"])).hexdigest()
    settings = _document(root, images[0]["Config"])
    return _Image(_pair(list(images[0]["Layers"]), settings), settings, digest)


def _pair(layers: list[str], settings: dict[str, Any]) -> list[tuple[str, str]]:
    diff_ids: list[str] = settings["rootfs"]["diff_ids"]
    if len(layers) != len(diff_ids):
        raise damaged(f"it has {len(layers)} layers and {len(diff_ids)} digests for them")
    return list(zip(layers, diff_ids, strict=True))


def _configuration(settings: dict[str, Any]) -> Configuration:
    inner = settings.get("config") or {}
    env = dict(text.partition("=")[::2] for text in inner.get("Env") or [] if "=" in text)
    return msgspec.convert(
        {
            "env": env,
            "workdir": inner.get("WorkingDir") or "",
            "user": inner.get("User") or "",
            "entrypoint": inner.get("Entrypoint") or [],
        },
        Configuration,
    )


# -- applying a layer ----------------------------------------------------------------------------------------------------------------


def _apply_layer(fd: int, diff_id: str, tree: RootedTree, destination: str, progress: Progress) -> None:
    """Read twice: to prove the digest and collect the whiteouts, then to write.

    Whiteouts are meant for the layers below alone, wherever in this one they stand.
    """
    prefix = destination.strip("/")

    def place(name: str) -> str:
        return f"{prefix}/{name}"

    removed: list[str] = []
    cleared: list[str] = []
    with decompressed(fd, progress) as stream:
        reader = ForwardReader(stream)
        for _, member in members(reader, need_end=False):
            folder, leaf = _split(member.name)
            if leaf == _OPAQUE:
                cleared.append(place(folder))
            elif leaf.startswith(_WHITEOUT) and not leaf.startswith(_AUFS):
                hidden = leaf.removeprefix(_WHITEOUT)
                if hidden in ("", ".", ".."):
                    raise damaged(f"the whiteout {member.name!r:.200} hides nothing")
                removed.append(place(f"{folder}/{hidden}"))
        found = reader.drain()
    if diff_id != f"sha256:{found}":
        raise damaged(f"a layer has the digest sha256:{found} instead of {diff_id:.100}")
    for name in cleared:
        tree.clear(name)
    for name in removed:
        tree.remove(name)
    with decompressed(fd, progress) as stream:
        for archive, member in members(ForwardReader(stream), need_end=False):
            if not _split(member.name)[1].startswith(_WHITEOUT):
                unpack_member(tree, archive, member, place)


def _split(name: str) -> tuple[str, str]:
    folder, _, leaf = name.rstrip("/").rpartition("/")
    return folder, leaf
