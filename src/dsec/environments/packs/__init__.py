"""Packs: the contents of files, each distinct run of bytes once, apart from the trees that refer to them.

    packs/<hex>.data      segments one after the other, each from a block's beginning, padded with zeros
    packs/<hex>.index     their digests and sizes, in order; its own SHA-256 is the pack's digest

So each byte is hashed once, for finding it again as well as for proving it, and a check can say which segment is bad.
"""

from dsec.environments.packs.index import IndexEntry, PackIndex, data_name, index_name, read_index
from dsec.environments.packs.known import ContentsLost, KnownContents
from dsec.environments.packs.packer import INLINE_LIMIT, Packer, Piece

__all__ = [
    "INLINE_LIMIT",
    "ContentsLost",
    "IndexEntry",
    "KnownContents",
    "PackIndex",
    "Packer",
    "Piece",
    "data_name",
    "index_name",
    "read_index",
]
