"""Trees whose contents are scattered over many packs are brought together: each pack is a device of the mount, and costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.environments.packs.index import data_name
from dsec.environments.packs.known import ContentsLost
from dsec.environments.packs.packer import MAX_PACKS, Packer
from dsec.environments.trees.model import BLOCK, Node, Segment

__all__ = ["limit_packs"]

_LITTLE: Final = 64 << 10
"""What is stored again rather than that a pack is kept, and opened, for it."""
_PIECE: Final = 4 << 20


def limit_packs(root: Node, packer: Packer, folder: Path, *, limit: int = MAX_PACKS, little: int = _LITTLE) -> int:
    """Store anew, in `packer`'s pack, what `root` has in those packs of `folder` that it uses least, so that at most `limit` remain.

    Packs that have no more than `little` bytes for the tree go in any case. Changes the tree's segments; returns the bytes stored anew.
    ContentsLost if a pack cannot be read.
    """
    used: dict[str, int] = {}
    files = list(_files(root))
    for node in files:
        for segment in node.segments:
            if segment.pack.digest:
                used[segment.pack.digest] = used.get(segment.pack.digest, 0) + segment.count * BLOCK
    ranked = sorted(used, key=lambda digest: (-used[digest], digest))
    going = {digest for position, digest in enumerate(ranked) if position >= limit - 1 or used[digest] <= little}
    before = packer.bytes_stored
    try:
        for node in files:
            if any(segment.pack.digest in going for segment in node.segments):
                node.segments = tuple(_moved(node, segment, packer, folder, going) for segment in node.segments)
    except OSError as error:
        if error.filename is None:  # not the pack that is read
            raise
        raise ContentsLost(f"a pack cannot be read: {error}") from error
    return packer.bytes_stored - before


def _files(root: Node) -> Iterator[Node]:
    seen: set[Node] = set()
    folders = [root]
    while folders:
        for node in (folders.pop().children or {}).values():
            if node.children is not None:
                folders.append(node)
            elif node.segments and node not in seen:
                seen.add(node)
                yield node


def _moved(node: Node, segment: Segment, packer: Packer, folder: Path, going: set[str]) -> Segment:
    if segment.pack.digest not in going:
        return segment
    size = min(segment.count * BLOCK, node.size - segment.at * BLOCK)
    pack, start = packer.store(_read(folder / data_name(segment.pack.digest), segment.start * BLOCK, size), shun=going)
    return Segment(segment.at, segment.count, pack, start)


def _read(path: Path, offset: int, size: int) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = offset + size
        while offset < end:
            data = os.pread(fd, min(_PIECE, end - offset), offset)
            if not data:
                raise ContentsLost(f"{path.name} is shorter than it was")
            yield data
            offset += len(data)
    finally:
        os.close(fd)
