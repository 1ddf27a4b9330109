"""An image's bytes, from its plan: one pass, from the first to the last, in bounded memory."""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from dsec.environments.erofs.layout import (
    BLOCK,
    CHUNK,
    CHUNK_INDEXES,
    CHUNK_SIZE,
    CHUNKED,
    COMPAT,
    DEVICE_SLOT,
    DEVICES_AT,
    DIRENT,
    DIRENT_SIZE,
    EXTENDED,
    FILE_TYPES,
    FLAT_INLINE,
    INCOMPAT_CHUNKS,
    INCOMPAT_DEVICES,
    INODE,
    INODE_SIZE,
    MAGIC,
    NULL,
    SLOT,
    SUPERBLOCK,
    SUPERBLOCK_AT,
    checksum,
    encode_rdev,
)
from dsec.environments.erofs.plan import Plan, Planned, plan_image
from dsec.environments.trees.model import Node, Pack

__all__ = ["write_image"]

_FLUSH: Final = 1 << 20
_CHECKSUM: Final = struct.Struct("<I")
_HOLE: Final = CHUNK.pack(0, 0, NULL)
_NANOSECONDS: Final = 1_000_000_000


def write_image(root: Node, file: BinaryIO | Path) -> list[Pack]:
    """Write the EROFS image of a tree, and give the packs in the order of its device table, which is that of their first use.

    The same tree gives the same bytes. A file object is written to from where it stands and needs no seek; nothing is made durable here.
    Raises ValueError before the first byte is written, for a tree that EROFS cannot hold: a pack without a digest, a name that is too long.
    """
    plan = plan_image(root)
    if isinstance(file, Path):
        with file.open("wb", buffering=0) as opened:
            _write(plan, opened)
    else:
        _write(plan, file)
    return plan.packs


def _write(plan: Plan, file: BinaryIO) -> None:
    pieces: list[bytes] = []
    held = 0
    first = True
    for piece in _image(plan):
        pieces.append(piece)
        held += len(piece)
        if held >= _FLUSH:
            _flush(file, pieces, first)
            pieces, held, first = [], 0, False
    _flush(file, pieces, first)


def _flush(file: BinaryIO, pieces: list[bytes], first: bool) -> None:
    data = bytearray().join(pieces)
    if first:
        _CHECKSUM.pack_into(data, SUPERBLOCK_AT + 4, checksum(data))
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _image(plan: Plan) -> Iterator[bytes]:
    yield bytes(SUPERBLOCK_AT)
    blocks = plan.inode_blocks + plan.data_blocks
    yield _superblock(plan, blocks)
    for pack in plan.packs:
        yield DEVICE_SLOT.pack(pack.digest.removeprefix("sha256:").encode(), pack.size // BLOCK, 0)
    at = DEVICES_AT + DEVICE_SLOT.size * len(plan.packs)
    for number, inode in enumerate(plan.inodes):
        place = inode.place
        if place != at:
            yield bytes(place - at)
        data = _inode(plan, inode, number)
        at = place + len(data)
        yield data
    yield bytes(-at % BLOCK)
    for inode in plan.embedded:
        yield from _whole_blocks(plan, inode)


def _superblock(plan: Plan, blocks: int) -> bytes:
    incompat = INCOMPAT_CHUNKS | (INCOMPAT_DEVICES if plan.packs else 0)
    return SUPERBLOCK.pack(
        MAGIC,
        0,
        COMPAT,
        BLOCK.bit_length() - 1,
        0,
        plan.root,
        len(plan.inodes),
        0,
        0,
        blocks,
        0,
        0,
        bytes(16),
        bytes(16),
        incompat,
        0,
        len(plan.packs),
        DEVICES_AT // DEVICE_SLOT.size if plan.packs else 0,
        0,
        0,
        0,
        0,
    )


def _inode(plan: Plan, inode: Planned, number: int) -> bytes:
    """An inode with its xattrs and what its layout asks for behind them."""
    node = inode.node
    layout = inode.layout
    size = inode.size
    xattrs = inode.xattrs
    address = 0
    behind = b""
    if layout == CHUNKED:
        address = inode.chunk_bits | CHUNK_INDEXES
        behind = _chunks(inode, plan.slots)
        if (fixed := INODE_SIZE + len(xattrs)) % CHUNK_SIZE:
            behind = bytes(-fixed % CHUNK_SIZE) + behind
    elif inode.data is not None:
        if size >= BLOCK or (size and layout != FLAT_INLINE):
            address = plan.inode_blocks + inode.first_block
        if layout == FLAT_INLINE:
            behind = _tail(plan, inode)
    elif node.rdev:
        address = encode_rdev(node.rdev)
    links = plan.links.get(node, 1)
    if node.children is not None:
        links = 2 + sum([child.children is not None for child in node.children.values()])
    seconds, nanoseconds = divmod(node.mtime_ns, _NANOSECONDS)
    head = INODE.pack(
        EXTENDED | layout << 1,
        (len(xattrs) - 12) // 4 + 1 if xattrs else 0,
        node.mode,
        0,
        size,
        address,
        number & 0xFFFFFFFF,
        node.uid,
        node.gid,
        seconds,
        nanoseconds,
        links,
    )
    return head + xattrs + behind


def _tail(plan: Plan, inode: Planned) -> bytes:
    data = inode.data
    if isinstance(data, list):
        *_, tail = _folder_blocks(plan, inode, data)
        return tail
    assert data is not None
    return data[inode.size - inode.size % BLOCK :]


def _whole_blocks(plan: Plan, inode: Planned) -> Iterator[bytes]:
    """What of the embedded content lies in blocks of its own."""
    data = inode.data
    whole = inode.size // BLOCK if inode.layout == FLAT_INLINE else -(-inode.size // BLOCK)
    if isinstance(data, list):
        for index, block in enumerate(_folder_blocks(plan, inode, data)):
            if index < whole:
                yield block.ljust(BLOCK, b"\0")
    else:
        assert data is not None
        yield data[: whole * BLOCK].ljust(whole * BLOCK, b"\0")


def _folder_blocks(plan: Plan, inode: Planned, names: list[bytes]) -> Iterator[bytes]:
    """A folder's entries, block by block, not padded."""
    if inode.size <= BLOCK:
        yield _entries(plan, inode, names)
        return
    first = used = 0
    for index, name in enumerate(names):
        need = DIRENT_SIZE + len(name)
        if used + need > BLOCK:
            yield _entries(plan, inode, names[first:index])
            first = index
            used = 0
        used += need
    yield _entries(plan, inode, names[first:])


def _entries(plan: Plan, inode: Planned, names: list[bytes]) -> bytes:
    children = inode.node.children
    assert children is not None
    numbers = plan.numbers
    at = DIRENT_SIZE * len(names)
    pieces = []
    for name in names:
        child = children.get(name)
        if child is not None:
            pieces.append(DIRENT.pack(numbers[child], at, FILE_TYPES[stat.S_IFMT(child.mode)]))
        else:
            number = inode.place // SLOT if name == b"." else inode.parent
            pieces.append(DIRENT.pack(number, at, FILE_TYPES[stat.S_IFDIR]))
        at += len(name)
    pieces += names
    return b"".join(pieces)


def _chunks(inode: Planned, slots: dict[Pack, int]) -> bytes:
    """A file's index, one entry for each of its chunks."""
    bits = inode.chunk_bits
    blocks = -(-inode.size // BLOCK)
    pieces = []
    at = 0
    for segment in inode.segments:
        if segment.at > at:
            pieces.append(_HOLE * ((segment.at - at) >> bits))
        device = slots[segment.pack] + 1
        start = segment.start
        if segment.count <= 1 << bits:
            pieces.append(CHUNK.pack(0, device, start))
        else:
            pieces += [CHUNK.pack(0, device, address) for address in range(start, start + segment.count, 1 << bits)]
        at = segment.at + segment.count
    if at < blocks:
        pieces.append(_HOLE * -(-(blocks - at) >> bits))
    return b"".join(pieces)
