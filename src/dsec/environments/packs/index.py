"""A pack's index: which segments lie in its data, in order.

    header   "DSECPACK", u32 version, u32 block, u64 number of entries, u64 bytes of data     little endian, 32 bytes
    entries  SHA-256 of the segment's bytes (32), u64 size in bytes                           40 bytes each

A segment begins where the blocks of the one before it end. The pack's digest is the SHA-256 of all of this.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.environments.trees.model import BLOCK

__all__ = ["IndexEntry", "PackIndex", "data_name", "decode_index", "encode_index", "index_name", "read_index"]

_HEADER: Final = struct.Struct("<8sIIQQ")
_ENTRY: Final = struct.Struct("<32sQ")
_MAGIC: Final = b"DSECPACK"
_VERSION: Final = 1


@dataclass(slots=True, frozen=True)
class IndexEntry:
    """One segment: the digest and size of its bytes, and the block of the data that it begins at."""

    digest: bytes
    size: int
    start: int


@dataclass(slots=True, frozen=True)
class PackIndex:
    """A decoded index; `size` is the length of the data."""

    digest: str
    size: int
    body: bytes

    def __len__(self) -> int:
        return len(self.body) // _ENTRY.size

    def __iter__(self) -> Iterator[IndexEntry]:
        start = 0
        for digest, size in _ENTRY.iter_unpack(self.body):
            yield IndexEntry(digest, size, start)
            start += -(-size // BLOCK)


def data_name(digest: str) -> str:
    """The data's file in the folder of packs."""
    return digest.removeprefix("sha256:") + ".data"


def index_name(digest: str) -> str:
    """The index's file in the folder of packs."""
    return digest.removeprefix("sha256:") + ".index"


def encode_index(entries: Iterable[tuple[bytes, int]]) -> tuple[bytes, str]:
    """The index of segments (digest, size), and the pack's digest."""
    body = bytearray()
    blocks = count = 0
    for digest, size in entries:
        body += _ENTRY.pack(digest, size)
        blocks += -(-size // BLOCK)
        count += 1
    data = _HEADER.pack(_MAGIC, _VERSION, BLOCK, count, blocks * BLOCK) + body
    return data, "sha256:" + hashlib.sha256(data).hexdigest()


def decode_index(data: bytes, digest: str) -> PackIndex:
    """Read an index and prove that it is that of the pack `digest`. Raises ValueError."""
    if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"the index of the pack {digest} is not what its digest says")
    if len(data) < _HEADER.size:
        raise ValueError(f"the index of the pack {digest} is too short")
    magic, version, block, count, size = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or block != BLOCK or len(data) != _HEADER.size + count * _ENTRY.size:
        raise ValueError(f"the index of the pack {digest} is of a format that is not known here")
    return PackIndex(digest, size, data[_HEADER.size :])


def read_index(folder: Path, digest: str) -> PackIndex:
    """The index of a pack in `folder`. Raises OSError or ValueError."""
    return decode_index((folder / index_name(digest)).read_bytes(), digest)
