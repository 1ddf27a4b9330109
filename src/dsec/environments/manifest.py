"""What is written beside a layer's two files. The digest is taken over `Identity`, so that it stands for the bytes and for the settings."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import msgspec

__all__ = ["KINDS", "Configuration", "FileDigest", "Identity", "Kind", "Manifest", "decode_manifest", "identity_digest"]

Kind = Literal["base", "workspace", "toolkit"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order of composition, from the bottom."""


class FileDigest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """SHA-256 (hex) and length of one file."""

    sha256: str
    size: int


class Configuration(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a layer says of the environment that it brings; empty means: as the layers below say."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] = []


class Identity(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All that the digest covers. Equal trees built with equal settings have equal digests, whenever and wherever."""

    format: Literal["dsec-layer-1"] = "dsec-layer-1"
    kind: Kind
    metadata: FileDigest
    data: FileDigest
    configuration: Configuration = Configuration()


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """`identity` and what is only told of it: the name it was first built under, from what, when, with which tools."""

    digest: str
    identity: Identity
    name: str
    source: str
    created_at: float
    provenance: dict[str, str] = {}


def identity_digest(identity: Identity) -> str:
    """`sha256:<hex>` of the canonical JSON: fields in declared order, the environment's names sorted."""
    return "sha256:" + hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()


def decode_manifest(text: bytes, digest: str) -> Manifest:
    """Read a manifest and prove that it is that of `digest`. Raises ValueError."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the manifest is unreadable: {error}") from None
    if manifest.digest != digest or identity_digest(manifest.identity) != digest:
        raise ValueError("the manifest is not that of its digest")
    return manifest
