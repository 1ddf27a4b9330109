"""Which blocks of its packs a layer refers to: written beside its metadata, so that asking what is used by whom reads no trees.

for each pack, in the manifest's order: u32 number of extents, then u32 first block and u32 number of blocks of each     little endian
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence

from dsec.environments.manifest import Contents
from dsec.environments.trees.model import BLOCK, Node, Pack

__all__ = ["Extents", "blocks_of", "decode_extents", "encode_extents", "joined", "measure"]

Extents = list[tuple[int, int]]
"""(first block, number of blocks), in order, neither overlapping nor touching."""


def joined(extents: Iterable[tuple[int, int]]) -> Extents:
    """The union of extents."""
    made: Extents = []
    for start, count in sorted(extents):
        if made and start <= made[-1][0] + made[-1][1]:
            first, length = made[-1]
            made[-1] = (first, max(length, start + count - first))
        else:
            made.append((start, count))
    return made


def blocks_of(extents: Extents) -> int:
    """How many blocks they are."""
    return sum(count for _, count in extents)


def measure(root: Node, packs: Sequence[Pack], own: Collection[str]) -> tuple[list[Extents], Contents]:
    """Of each pack what the tree refers to, and how much that is. `own` are the digests of packs that were made for it."""
    found: dict[str, list[tuple[int, int]]] = {pack.digest: [] for pack in packs}
    files = logical = 0
    seen: set[Node] = set()
    folders = [root]
    while folders:
        for node in (folders.pop().children or {}).values():
            if node.children is not None:
                folders.append(node)
            elif node.is_file and node not in seen:
                seen.add(node)
                files += 1
                logical += node.size
                for segment in node.segments:
                    found[segment.pack.digest].append((segment.start, segment.count))
    extents = [joined(found[pack.digest]) for pack in packs]
    sizes = [blocks_of(each) * BLOCK for each in extents]
    stored = sum(size for size, pack in zip(sizes, packs, strict=True) if pack.digest in own)
    return extents, Contents(files=files, logical_bytes=logical, data_bytes=sum(sizes), stored_bytes=stored)


def encode_extents(packs: Iterable[Extents]) -> bytes:
    """See the module."""
    data = bytearray()
    for extents in packs:
        data += struct.pack("<I", len(extents))
        for extent in extents:
            data += struct.pack("<II", *extent)
    return bytes(data)


def decode_extents(data: bytes, packs: int) -> list[Extents]:
    """The extents of a layer with that many packs. Raises ValueError."""
    found: list[Extents] = []
    at = 0
    try:
        for _ in range(packs):
            [count] = struct.unpack_from("<I", data, at)
            body = data[at + 4 : at + 4 + 8 * count]
            found.append([(start, length) for start, length in struct.iter_unpack("<II", body)])
            if len(found[-1]) != count:
                raise ValueError("the extents of a layer are cut off")
            at += 4 + 8 * count
    except struct.error as error:
        raise ValueError(f"the extents of a layer are damaged: {error}") from error
    if at != len(data):
        raise ValueError("the extents of a layer are not those of its packs")
    return found
