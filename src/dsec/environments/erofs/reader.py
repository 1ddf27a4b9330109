"""An image back to the tree that it was written from. Bytes from a store are not trusted: they are a tree or a ValueError."""

from __future__ import annotations

import itertools
import stat
import struct
from pathlib import Path
from typing import BinaryIO, Final

from dsec.environments.erofs.layout import (
    BLOCK,
    CHECKSUMMED,
    CHUNK,
    CHUNK_BITS_LIMIT,
    CHUNK_INDEXES,
    CHUNK_SIZE,
    CHUNKED,
    DEVICE_SLOT,
    DEVICES,
    DIRENT,
    DIRENT_SIZE,
    EXTENDED,
    FILE_TYPES,
    FLAT_INLINE,
    FLAT_PLAIN,
    INCOMPAT_CHUNKS,
    INCOMPAT_DEVICES,
    INODE,
    INODE_SIZE,
    MAGIC,
    MAX_NAME,
    NULL,
    OWNERS,
    SLOT,
    SUPERBLOCK,
    SUPERBLOCK_AT,
    checksum,
    decode_rdev,
)
from dsec.environments.erofs.xattrs import decode_xattrs
from dsec.environments.trees.model import Node, Pack, Segment

__all__ = ["read_image"]

_NANOSECONDS: Final = 1_000_000_000


def read_image(file: Path | BinaryIO, packs: dict[str, Pack] | None = None) -> Node:
    """The tree of an image that `write_image` wrote, equal to the one that it was written from.

    With `packs`, a digest that is known there gives that very `Pack`, and new ones are added: so trees of several images share theirs.
    Raises ValueError for any other or damaged content, also for images that other tools made with what ours do not use (compression).
    """
    data = file.read_bytes() if isinstance(file, Path) else file.read()
    try:
        return _Image(data, {} if packs is None else packs).tree()
    except (struct.error, OverflowError) as error:
        raise ValueError(f"damaged EROFS image: {error}") from error


class _Image:
    def __init__(self, data: bytes, known: dict[str, Pack]) -> None:
        self.data = data
        if len(data) < BLOCK:
            raise ValueError(f"an EROFS image of {len(data)} bytes: truncated")
        fields = SUPERBLOCK.unpack_from(data, SUPERBLOCK_AT)
        magic, stated, compat, bits, extension_slots, self.root, _, _, _, self.blocks, inode_block, *rest = fields
        incompat, devices, first_slot, folder_bits = rest[3], rest[5], rest[6], rest[7]
        if magic != MAGIC or not compat & CHECKSUMMED:
            raise ValueError("not an EROFS image, or one without a checksum")
        if checksum(data) != stated:
            raise ValueError("the checksum of an EROFS image's superblock is wrong")
        if 1 << bits != BLOCK or extension_slots or folder_bits or inode_block or incompat & ~(INCOMPAT_CHUNKS | INCOMPAT_DEVICES):
            raise ValueError(f"an EROFS image with other features than ours (incompat {incompat:#x}, block bits {bits})")
        if self.blocks * BLOCK != len(data):
            raise ValueError(f"an EROFS image of {len(data)} bytes that says that it has {self.blocks} blocks: truncated")
        self.packs: list[Pack] = []
        if incompat & INCOMPAT_DEVICES:
            self._read_devices(devices, first_slot * DEVICE_SLOT.size, known)
        # a damaged image could have every folder point at the same bytes; what is read in all is no more than what there is
        self.budget = len(data)
        self.nodes: dict[int, Node] = {}

    def _read_devices(self, devices: int, at: int, known: dict[str, Pack]) -> None:
        if devices > DEVICES:
            raise ValueError(f"an EROFS image with {devices} devices")
        found: list[Pack] = []
        for _ in range(devices):
            tag, blocks, mapped = DEVICE_SLOT.unpack_from(self.data, at)
            at += DEVICE_SLOT.size
            if mapped or not blocks or tag.translate(None, b"0123456789abcdef"):
                raise ValueError("a damaged device table in an EROFS image")
            digest = "sha256:" + tag.decode("ascii")
            pack = known.get(digest) or Pack(digest, blocks * BLOCK)
            if pack.size != blocks * BLOCK:
                raise ValueError(f"the pack {digest} has {pack.size} bytes and not {blocks * BLOCK}")
            found.append(pack)
        for pack in found:
            known[pack.digest] = pack
        self.packs = found

    def tree(self) -> Node:
        root, names = self._inode(self.root)
        if names is None:
            raise ValueError("the root of an EROFS image is not a folder")
        folders = [(root, self.root, self.root, names)]
        while folders:
            folder, number, parent, names = folders.pop()
            children = folder.children
            assert children is not None
            if [name for name in names if name in (b".", b"..")] != [b".", b".."] or names[b"."][0] != number or names[b".."][0] != parent:
                raise ValueError(f"the folder {number} of an EROFS image has a wrong `.` or `..`")
            for name, (child_number, file_type) in names.items():
                if name in (b".", b".."):
                    continue
                known = self.nodes.get(child_number)
                if known is None:
                    child, below = self._inode(child_number)
                    if below is not None:
                        folders.append((child, child_number, number, below))
                elif known.children is not None:
                    raise ValueError(f"the folder {child_number} of an EROFS image has two names")
                else:
                    child = known
                if FILE_TYPES[stat.S_IFMT(child.mode)] != file_type:
                    raise ValueError(f"the inode {child_number} of an EROFS image is not of the type that its name says")
                children[name] = child
        return root

    def _inode(self, number: int) -> tuple[Node, dict[bytes, tuple[int, int]] | None]:
        """A new inode, and of a folder its entries, which are not yet among its children."""
        at = number * SLOT
        if at + INODE_SIZE > len(self.data) or at < SUPERBLOCK_AT + SUPERBLOCK.size:
            raise ValueError(f"no inode {number} in an EROFS image")
        fields = INODE.unpack_from(self.data, at)
        form, xattrs_length, mode, _, size, address, _, uid, gid, seconds, nanoseconds, _ = fields
        layout = form >> 1
        kind = stat.S_IFMT(mode)
        if not form & EXTENDED or layout not in (FLAT_PLAIN, FLAT_INLINE, CHUNKED) or kind not in FILE_TYPES or nanoseconds >= _NANOSECONDS:
            raise ValueError(f"the inode {number} of an EROFS image is damaged or of a kind that we do not write")
        if size >= 1 << 63 or uid >= OWNERS or gid >= OWNERS:
            raise ValueError(f"the inode {number} of an EROFS image has {size} bytes and the owner {uid}:{gid}")
        at += INODE_SIZE
        xattrs = {}
        if xattrs_length:
            length = 12 + 4 * (xattrs_length - 1)
            xattrs = decode_xattrs(self._take(at, length))
            at += length
        node = Node(mode, uid, gid, seconds * _NANOSECONDS + nanoseconds, xattrs)
        self.nodes[number] = node
        names = None
        if kind == stat.S_IFREG:
            node.size = size
            self._read_content(node, layout, address, at)
        elif kind == stat.S_IFLNK:
            node.target = self._embedded(layout, size, address, at)
            if not node.target or b"\0" in node.target or size >= BLOCK:
                raise ValueError(f"the link {number} of an EROFS image has no possible target")
        elif kind == stat.S_IFDIR:
            node.children = {}
            names = _entries(self._embedded(layout, size, address, at))
        elif size or layout != FLAT_PLAIN:
            raise ValueError(f"the special file {number} of an EROFS image has a content")
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            node.rdev = decode_rdev(address)
        return node, names

    def _take(self, at: int, length: int) -> bytes:
        self.budget -= length
        if at + length > len(self.data) or self.budget < 0:
            raise ValueError("an inode of an EROFS image reaches beyond its end")
        return self.data[at : at + length]

    def _embedded(self, layout: int, size: int, address: int, at: int) -> bytes:
        """Content that lies in the image."""
        if layout == FLAT_INLINE:
            tail = size % BLOCK
            if at % BLOCK + tail > BLOCK:
                raise ValueError("the inline content of an EROFS image crosses a block")
            return (self._take(address * BLOCK, size - tail) if size >= BLOCK else b"") + self._take(at, tail)
        if layout != FLAT_PLAIN or (size and address >= self.blocks):
            raise ValueError("a folder or a link of an EROFS image that does not lie in it")
        return self._take(address * BLOCK, size)

    def _read_content(self, node: Node, layout: int, address: int, at: int) -> None:
        size = node.size
        blocks = -(-size // BLOCK)
        if layout == CHUNKED:
            node.segments = self._chunks(blocks, address, at)
        else:
            node.inline = self._embedded(layout, size, address, at)

    def _segment(self, at: int, count: int, device: int, address: int) -> Segment:
        if not 0 < device <= len(self.packs) or (address + count) * BLOCK > self.packs[device - 1].size:
            raise ValueError(f"the block {address} of device {device} of an EROFS image lies in no pack")
        return Segment(at, count, self.packs[device - 1], address)

    def _chunks(self, blocks: int, form: int, at: int) -> tuple[Segment, ...]:
        bits = form & CHUNK_BITS_LIMIT
        if form != bits | CHUNK_INDEXES or not blocks:
            raise ValueError(f"the chunks of an EROFS image have format {form:#x}, or no content")
        chunks = -(-blocks >> bits)
        at += -at % CHUNK_SIZE
        data = self._take(at, CHUNK_SIZE * chunks)
        if chunks == 1:
            _, device, address = CHUNK.unpack(data)
            return () if address == NULL else (self._segment(0, blocks, device, address),)
        segments: list[Segment] = []
        start = 0
        # runs of chunks that follow each other: the distance between a block in its pack and in the file stays the same
        for key, run in itertools.groupby(
            enumerate(CHUNK.iter_unpack(data)),
            lambda pair: None if pair[1][2] == NULL else (pair[1][1], pair[1][2] - (pair[0] << bits)),
        ):
            count = sum(1 for _ in run)
            if key is not None:
                device, distance = key
                first = start << bits
                segments.append(self._segment(first, min(count << bits, blocks - first), device, distance + first))
            start += count
        return tuple(segments)


def _entries(data: bytes) -> dict[bytes, tuple[int, int]]:
    """The names in a folder's content, with nid and type."""
    names: dict[bytes, tuple[int, int]] = {}
    last = b""
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        _, heads_end, _ = DIRENT.unpack_from(block)
        if not DIRENT_SIZE <= heads_end <= len(block) or heads_end % DIRENT_SIZE:
            raise ValueError("a folder of an EROFS image has a damaged block")
        entries = list(DIRENT.iter_unpack(block[:heads_end]))
        for index, (number, at, file_type) in enumerate(entries):
            end = entries[index + 1][1] if index + 1 < len(entries) else len(block)
            name = block[at:end]
            if index + 1 == len(entries):
                name = name.rstrip(b"\0")
            if at > end or not last < name or len(name) > MAX_NAME or b"/" in name or b"\0" in name:
                raise ValueError("a folder of an EROFS image has names that are damaged or not in order")
            names[name] = (number, file_type)
            last = name
    return names
