"""Writes container images as an OCI layout (image-spec 1.1): layers from tar streams, compressed as registries have them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

__all__ = ["Compression", "ImageLayout", "LayerBlob", "decompressor"]

Compression = Literal["zstd", "gzip", "none"]

_COMPRESSORS: dict[str, list[str]] = {"zstd": ["zstd", "-q", "-3", "-c"], "gzip": ["gzip", "-n", "-6", "-c"], "none": ["cat"]}
_DECOMPRESSORS: dict[str, list[str]] = {"zstd": ["zstd", "-q", "-d", "-c"], "gzip": ["gzip", "-d", "-c"], "none": ["cat"]}
_SUFFIX = {"zstd": "+zstd", "gzip": "+gzip", "none": ""}
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def decompressor(compression: Compression) -> list[str]:
    """The command that turns a layer's blob on its stdin into a tar stream."""
    return _DECOMPRESSORS[compression]


class LayerBlob(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: its blob's digest and size, the digest and size of the tar stream in it."""

    digest: str
    size: int
    diff_id: str
    tar_bytes: int
    compression: Compression

    @property
    def path(self) -> str:
        """Below the layout."""
        return f"blobs/sha256/{self.digest.removeprefix('sha256:')}"


class _Hashing:
    """A stream that hashes and counts what goes on to another."""

    def __init__(self, target: BinaryIO) -> None:
        self._target, self.sha256, self.size = target, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += len(data)
        self._target.write(data)
        return len(data)


class ImageLayout:
    """A layout in `folder`. Any number of images may share its blobs; `finish` writes the index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blobs = folder / "blobs" / "sha256"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._images: list[dict[str, Any]] = []

    def add_layer(self, produce: Callable[[BinaryIO], None], compression: Compression) -> LayerBlob:
        """`produce` writes the tar stream."""
        partial = self.folder / "partial"
        with partial.open("wb") as file:
            with subprocess.Popen(_COMPRESSORS[compression], stdin=subprocess.PIPE, stdout=file) as compress:
                assert compress.stdin is not None
                stream = _Hashing(compress.stdin)  # type: ignore[arg-type]
                with compress.stdin:
                    produce(stream)  # type: ignore[arg-type]
            if compress.returncode != 0:
                raise RuntimeError(f"{_COMPRESSORS[compression][0]} ended with {compress.returncode}")
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = partial.stat().st_size
        partial.rename(self._blobs / digest)
        return LayerBlob(
            digest=f"sha256:{digest}",
            size=size,
            diff_id=f"sha256:{stream.sha256.hexdigest()}",
            tar_bytes=stream.size,
            compression=compression,
        )

    def add_image(self, name: str, layers: Sequence[LayerBlob], settings: dict[str, Any]) -> None:
        """Layers from the bottom; `settings` is the `config` of the image's configuration."""
        rootfs = {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]}
        configuration = self._document({"architecture": "amd64", "os": "linux", "config": settings, "rootfs": rootfs}, _CONFIG)
        described = [
            {"mediaType": f"application/vnd.oci.image.layer.v1.tar{_SUFFIX[one.compression]}", "digest": one.digest, "size": one.size}
            for one in layers
        ]
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": configuration, "layers": described}
        annotations = {"org.opencontainers.image.ref.name": name}
        self._images.append(self._document(manifest, _MANIFEST) | {"annotations": annotations})

    def _document(self, value: dict[str, Any], media_type: str) -> dict[str, Any]:
        data = json.dumps(value, sort_keys=True).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self._blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def finish(self) -> None:
        """The index and the layout's mark; on the disk when it returns."""
        index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": self._images}
        (self.folder / "index.json").write_text(json.dumps(index))
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        os.sync()
