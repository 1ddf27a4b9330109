"""What is written beside a layer's metadata. The digest is taken over `Identity`, so that it stands for the bytes and for the settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final, Literal, get_args

import msgspec

__all__ = [
    "COUNTED",
    "KINDS",
    "Configuration",
    "Contents",
    "FileDigest",
    "Identity",
    "Kind",
    "Manifest",
    "PackUse",
    "decode_manifest",
    "encode_manifest",
    "identity_digest",
    "merged_configuration",
]

Kind = Literal["base", "workspace", "toolkit", "snapshot"]
COUNTED: Final = (1 << 63) - 1
"""What every format of ours has room for."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order of composition, from the bottom; a snapshot goes where the lowest layer that it is a difference to goes."""


_Digest = Annotated[str, msgspec.Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
"""Becomes names of files."""


class FileDigest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """SHA-256 (hex) and length of one file."""

    sha256: str
    size: int


class PackUse(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A pack that the metadata refers to, in the order of its device table; `size` is the length of the pack's data."""

    digest: _Digest
    size: int


class Configuration(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a layer says of the environment that it brings; empty means: as the layers below say."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] = []
    command: list[str] = []
    """What an image runs by default, after its entrypoint."""


def merged_configuration(settings: Iterable[Configuration]) -> Configuration:
    """What layers say together, from the bottom: the upper ones' word holds."""
    env: dict[str, str] = {}
    workdir, user, entrypoint, command = "", "", list[str](), list[str]()
    for each in settings:
        env |= each.env
        workdir, user = each.workdir or workdir, each.user or user
        if each.entrypoint or each.command:  # a command is meant for the entrypoint that it comes with
            entrypoint, command = each.entrypoint or entrypoint, each.command
    return Configuration(env=env, workdir=workdir, user=user, entrypoint=list(entrypoint), command=list(command))


class Identity(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All that the digest covers. Equal trees whose contents lie in equal packs have equal digests, whenever and wherever."""

    format: Literal["dsec-layer-2"] = "dsec-layer-2"
    kind: Kind
    metadata: FileDigest
    packs: list[PackUse] = []
    configuration: Configuration = Configuration()
    below: list[_Digest] = []
    """Digests, from the bottom, of the layers that this one is a difference to: it is of no use without them."""


class Contents(msgspec.Struct, kw_only=True, frozen=True):
    """How much there is in a layer. Files of a sandbox may claim any size: together they are told to be at most COUNTED bytes."""

    files: int = 0
    logical_bytes: int = 0
    """Of all files, holes and repetitions included."""
    data_bytes: int = 0
    """In packs, each segment once, in whole blocks."""
    stored_bytes: int = 0
    """Of these, what the layer brought into the store; the rest was there."""

    def __post_init__(self) -> None:
        if self.logical_bytes > COUNTED:
            msgspec.structs.force_setattr(self, "logical_bytes", COUNTED)


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """`identity` and what is only told of it: the name it was first built under, from what, when, with which tools."""

    digest: str
    identity: Identity
    name: str
    source: str
    created_at: float
    provenance: dict[str, str] = {}
    contents: Contents = Contents()


def identity_digest(identity: Identity) -> str:
    """`sha256:<hex>` of the canonical JSON: fields in declared order, the environment's names sorted."""
    return "sha256:" + hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Indented: people read it."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def decode_manifest(text: bytes, digest: str) -> Manifest:
    """Read a manifest and prove that it is that of `digest`. Raises ValueError."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the manifest is unreadable: {error}") from None
    if manifest.digest != digest or identity_digest(manifest.identity) != digest:
        raise ValueError("the manifest is not that of its digest")
    return manifest
