"""Where everything of an image goes: the pass over a tree that gives each inode its place, before a byte is written."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import Final

from dsec.environments.erofs.layout import (
    BLOCK,
    CHUNK_BITS_LIMIT,
    CHUNK_SIZE,
    CHUNKED,
    DEVICE_SLOT,
    DEVICES,
    DEVICES_AT,
    DIRENT_SIZE,
    FILE_TYPES,
    FLAT_INLINE,
    FLAT_PLAIN,
    INODE_SIZE,
    MAX_NAME,
    NULL,
    OWNERS,
    SLOT,
    encode_rdev,
)
from dsec.environments.erofs.xattrs import encode_xattrs
from dsec.environments.trees.model import Node, Pack, Segment

__all__ = ["Plan", "Planned", "plan_image"]

_CHUNKS: Final = 1 << 21
"""Chunks that one file may need (16 MiB of them). Who stores a file chooses the granularity of its holes so that it needs far fewer."""

_ALL_CHUNKS: Final = 1 << 24
"""Chunks of all files together. Files that are nothing but a hole of the greatest size need a million each, and anybody may make many."""

_TIMES: Final = 1_000_000_000 << 63

_GAPS: Final = 32
"""Places left free at the ends of blocks that are remembered for later, smaller inodes."""


@dataclass(slots=True)
class Planned:
    """An inode with its place. `data` is what is embedded: a folder's sorted names, a link's target, a small file's content."""

    place: int
    node: Node
    xattrs: bytes
    layout: int
    size: int
    parent: int = 0
    data: bytes | list[bytes] | None = None
    first_block: int = 0
    """Of whole blocks that are embedded, counted from the end of the inodes."""
    chunk_bits: int = 0
    segments: tuple[Segment, ...] = ()


@dataclass(slots=True)
class Plan:
    """All inodes in the order of their places, and those with embedded whole blocks in the order of these."""

    inodes: list[Planned]
    embedded: list[Planned]
    root: int
    """Its nid."""
    numbers: dict[Node, int]
    """Of each node its nid."""
    links: dict[Node, int]
    """Names of a file, where it has more than one."""
    packs: list[Pack]
    slots: dict[Pack, int]
    """Of each pack its index in `packs`; equal digests share one."""
    inode_blocks: int
    data_blocks: int


def plan_image(root: Node) -> Plan:
    """Lay out a tree: a folder's entries next to each other, folders in depth-first order. Raises ValueError for what EROFS cannot hold."""
    # first the packs, as their slots stand before the inodes
    folders, slots, packs = _survey(root)
    space = _Space(DEVICES_AT + DEVICE_SLOT.size * len(packs))
    top = _plan_folder(root, folders[0][1], space)
    inodes = [top]
    planned_folders = {root: top}
    names_of = dict(folders)
    numbers = {root: top.place // SLOT}
    top.parent = numbers[root]
    links: dict[Node, int] = {}
    for folder, names in folders:
        children = folder.children
        assert children is not None
        number = planned_folders.pop(folder).place // SLOT
        for name in names:
            child = children.get(name)
            if child is None:  # `.` or `..`
                continue
            if child in numbers:
                links[child] = links.get(child, 1) + 1
                continue
            if child.children is not None:
                planned = _plan_folder(child, names_of[child], space)
                planned.parent = number
                planned_folders[child] = planned
            else:
                planned = _plan_other(name, child, space, slots)
            numbers[child] = planned.place // SLOT
            inodes.append(planned)
    embedded = [planned for planned in inodes if planned.data is not None and (planned.layout == FLAT_PLAIN or planned.size >= BLOCK)]
    embedded.sort(key=lambda planned: planned.first_block)
    inodes.sort(key=lambda planned: planned.place)
    return Plan(inodes, embedded, numbers[root], numbers, links, packs, slots, -(-space.end // BLOCK), space.blocks)


def _survey(root: Node) -> tuple[list[tuple[Node, list[bytes]]], dict[Pack, int], list[Pack]]:
    """Folders with their sorted names, `.` and `..` among them, depth first; packs in the order of their first use."""
    folders: list[tuple[Node, list[bytes]]] = []
    slots: dict[Pack, int] = {}
    packs: list[Pack] = []
    digests: dict[str, int] = {}
    if root.children is None:
        raise ValueError("the root of an image must be a folder")
    seen = {root}
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        children = folder.children
        assert children is not None
        names = [*children, b".", b".."]
        names.sort()
        folders.append((folder, names))
        below = []
        for name in names:
            child = children.get(name)
            if child is None:
                continue
            if child.children is not None:
                if child in seen:
                    raise ValueError(f"the folder {name!r} is in the tree twice")
                seen.add(child)
                below.append(child)
            for segment in child.segments:
                if segment.pack not in slots:
                    slots[segment.pack] = _slot(segment.pack, packs, digests)
        waiting.extend(reversed(below))
    if len(packs) > DEVICES:
        raise ValueError(f"contents in {len(packs)} packs: an image may refer to {DEVICES}")
    return folders, slots, packs


def _slot(pack: Pack, packs: list[Pack], digests: dict[str, int]) -> int:
    """A pack's place in the device table; equal digests share one."""
    tag = pack.digest.removeprefix("sha256:")
    if len(tag) != 64 or not pack.digest.startswith("sha256:") or pack.size <= 0 or pack.size % BLOCK or pack.size // BLOCK > NULL:
        raise ValueError(f"a pack that is not finished, or larger than 16 TiB: digest {pack.digest!r}, {pack.size} bytes")
    slot = digests.setdefault(pack.digest, len(packs))
    if slot == len(packs):
        packs.append(pack)
    elif packs[slot].size != pack.size:
        raise ValueError(f"the pack {pack.digest} has two sizes: {packs[slot].size} and {pack.size}")
    return slot


@dataclass(slots=True)
class _Space:
    """Free places for inodes, and a count of the whole blocks that are embedded."""

    end: int
    blocks: int = 0
    chunks: int = 0
    """Of all files up to now."""
    _gaps: list[tuple[int, int]] = field(default_factory=list)
    _largest: int = 0

    def take(self, length: int, *, within_block: bool) -> int:
        length = -(-length // SLOT) * SLOT
        if length <= self._largest:
            return self._take_gap(length)
        place = self.end
        free = -place % BLOCK
        if within_block and free < length:
            if free >= INODE_SIZE:
                self._keep_gap(place, free)
            place += free
        self.end = place + length
        return place

    def _keep_gap(self, place: int, free: int) -> None:
        if len(self._gaps) == _GAPS:
            self._gaps.remove(min(self._gaps, key=lambda gap: gap[1]))
        self._gaps.append((place, free))
        self._largest = max(free for _, free in self._gaps)

    def _take_gap(self, length: int) -> int:
        at = min((index for index, gap in enumerate(self._gaps) if gap[1] >= length), key=lambda index: self._gaps[index][1])
        place, free = self._gaps.pop(at)
        if free - length >= INODE_SIZE:
            self._gaps.append((place + length, free - length))
        self._largest = max((free for _, free in self._gaps), default=0)
        return place

    def embed(self, xattrs_length: int, length: int) -> tuple[int, int, int]:
        """A place for an inode with `length` bytes of embedded content: place, layout, first of its whole blocks."""
        fixed = INODE_SIZE + xattrs_length
        tail = length % BLOCK
        first_block = self.blocks
        if tail and fixed + tail <= BLOCK:
            self.blocks += length // BLOCK
            return self.take(fixed + tail, within_block=True), FLAT_INLINE, first_block
        self.blocks += -(-length // BLOCK)
        return self.take(fixed, within_block=False), FLAT_PLAIN, first_block


def _check(name: bytes, node: Node) -> None:
    if not 0 <= node.uid < OWNERS or not 0 <= node.gid < OWNERS:
        raise ValueError(f"{name!r} has the owner {node.uid}:{node.gid}: 0 to {OWNERS - 1} are allowed")
    if not -_TIMES <= node.mtime_ns < _TIMES:
        raise ValueError(f"{name!r} has the time {node.mtime_ns} ns: it does not fit in 64 bits of seconds")
    if not 0 <= node.mode < 1 << 16:
        raise ValueError(f"{name!r} has mode {node.mode:o}")


def _plan_folder(node: Node, names: list[bytes], space: _Space) -> Planned:
    children = node.children
    assert children is not None
    _check(b"a folder", node)
    if not stat.S_ISDIR(node.mode) or b"." in children or b".." in children:
        raise ValueError("a node with entries that is not a folder, or a folder with an entry named `.` or `..`")
    longest = max(map(len, names))
    if longest > MAX_NAME or names[0] == b"":
        raise ValueError(f"a name of {longest} bytes, or of none: names have 1 to {MAX_NAME} bytes")
    joined = b"".join(names)
    if b"/" in joined or b"\0" in joined:
        raise ValueError(f"a slash or a NUL in a name, one of {len(children)} in a folder")
    size = DIRENT_SIZE * len(names) + len(joined)
    if size > BLOCK:
        whole = used = 0
        for name in names:
            need = DIRENT_SIZE + len(name)
            if used + need > BLOCK:
                whole += 1
                used = 0
            used += need
        size = whole * BLOCK + used
    xattrs = encode_xattrs(node.xattrs)
    place, layout, first_block = space.embed(len(xattrs), size)
    return Planned(place, node, xattrs, layout, size, data=names, first_block=first_block)


def _plan_other(name: bytes, node: Node, space: _Space, slots: dict[Pack, int]) -> Planned:
    _check(name, node)
    kind = stat.S_IFMT(node.mode)
    xattrs = encode_xattrs(node.xattrs) if node.xattrs else b""
    if kind == stat.S_IFREG:
        if node.inline is None:
            return _plan_stored(name, node, space, slots, xattrs)
        data = node.inline
        if len(data) != node.size or node.segments:
            raise ValueError(f"the file {name!r} has {node.size} bytes, but {len(data)} inline")
    elif kind == stat.S_IFLNK:
        data = node.target
        if not data or len(data) >= BLOCK or b"\0" in data:
            raise ValueError(f"the link {name!r} has a target of {len(data)} bytes: 1 to {BLOCK - 1} are allowed, none of them NUL")
    elif kind in FILE_TYPES and kind != stat.S_IFDIR:
        encode_rdev(node.rdev)
        place = space.take(INODE_SIZE + len(xattrs), within_block=False)
        return Planned(place, node, xattrs, FLAT_PLAIN, 0)
    else:
        raise ValueError(f"{name!r} has mode {node.mode:o}: not a type of file that can be, or a folder without entries")
    place, layout, first_block = space.embed(len(xattrs), len(data))
    return Planned(place, node, xattrs, layout, len(data), data=data, first_block=first_block)


def _plan_stored(name: bytes, node: Node, space: _Space, slots: dict[Pack, int], xattrs: bytes) -> Planned:
    size = node.size
    if not 0 <= size < 1 << 63:
        raise ValueError(f"the file {name!r} has {size} bytes")
    blocks = -(-size // BLOCK)
    end = 0
    for segment in node.segments:
        stop = segment.start + segment.count
        if segment.at < end or segment.count <= 0 or segment.start < 0 or stop * BLOCK > segment.pack.size:
            raise ValueError(f"the file {name!r} has segments that overlap or lie outside of their packs")
        end = segment.at + segment.count
    if end > blocks:
        raise ValueError(f"the file {name!r} has segments beyond its end")
    fixed = INODE_SIZE + len(xattrs)
    if not blocks:
        return Planned(space.take(fixed, within_block=False), node, xattrs, FLAT_PLAIN, 0)
    segments = _joined(node.segments, slots) if len(node.segments) > 1 else node.segments
    bits = _chunk_bits(segments, blocks)
    chunks = -(-blocks >> bits)
    if chunks > _CHUNKS:
        raise ValueError(f"the file {name!r} of {size} bytes has holes so fine that it needs {chunks} chunks: at most {_CHUNKS}")
    space.chunks += chunks
    if space.chunks > _ALL_CHUNKS:
        raise ValueError(f"files with holes so large that together they need more than {_ALL_CHUNKS} chunks, one of them {name!r}")
    place = space.take(fixed + -fixed % CHUNK_SIZE + CHUNK_SIZE * chunks, within_block=False)
    return Planned(place, node, xattrs, CHUNKED, size, chunk_bits=bits, segments=segments)


def _joined(segments: tuple[Segment, ...], slots: dict[Pack, int]) -> tuple[Segment, ...]:
    """Neighbours that are neighbours in their pack too become one."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and slots[last.pack] == slots[segment.pack]
            and last.at + last.count == segment.at
            and last.start + last.count == segment.start
        ):
            joined[-1] = Segment(last.at, last.count + segment.count, last.pack, last.start)
        else:
            joined.append(segment)
    return tuple(joined)


def _chunk_bits(segments: tuple[Segment, ...], blocks: int) -> int:
    """The largest chunk, as a power of two of blocks, such that none has a border between data and hole, or of two segments, within."""
    borders = 0
    for segment in segments:
        borders |= segment.at
        if segment.at + segment.count < blocks:
            borders |= segment.at + segment.count
    if borders:
        return min(CHUNK_BITS_LIMIT, (borders & -borders).bit_length() - 1)
    return min(CHUNK_BITS_LIMIT, (blocks - 1).bit_length())
