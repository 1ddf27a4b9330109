"""EROFS as it lies on disk: the records that our images are made of, and nothing else of the format.

From the kernel's `Documentation/filesystems/erofs.rst` and the definitions in `fs/erofs/erofs_fs.h`. All numbers are little-endian,
blocks have 4096 bytes.

```
 0      1024         1152                1152 + 128 n
 |unused| superblock | n device slots    | inodes ...                                  | blocks of large folders and links |
                       one a pack          64 bytes each, from multiples of 32: the
                                           offset / 32 is the inode's number (nid)
```

An inode is followed by its xattrs, then by what its layout asks for:

- FLAT_INLINE: the end of the content, which must not cross a block. Whole blocks before it lie at `address`.
- FLAT_PLAIN: nothing; the content lies at `address`, in one piece.
- CHUNKED: from a multiple of 8 an index for each chunk, with a device and a block in it; the address NULL is a hole. A chunk is 2^n
  blocks, n chosen for each inode, so that a file in one piece needs one index.

The format could also map all packs into one space of addresses (`mapped` in the device slots), and a file in one piece would need no index.
But when the kernel (seen: 6.18) reads plain files that way, it compares addresses of that space with offsets in a pack to see whether two
reads follow each other. At best no two reads are joined, at worst two chunks are that do not belong together, and a file shows the bytes
of another.

A folder is a row of blocks; each has its entries of 12 bytes first, then the names that they point to, in bytes' order over the whole
folder, `.` and `..` among them. The kernel finds a name by two binary searches.
"""

from __future__ import annotations

import stat
import struct
from typing import Final

__all__ = [
    "BLOCK",
    "CHECKSUMMED",
    "CHUNK",
    "CHUNKED",
    "CHUNK_BITS_LIMIT",
    "CHUNK_INDEXES",
    "CHUNK_SIZE",
    "COMPAT",
    "DEVICES",
    "DEVICES_AT",
    "DEVICE_SLOT",
    "DIRENT",
    "DIRENT_SIZE",
    "EXTENDED",
    "FILE_TYPES",
    "FLAT_INLINE",
    "FLAT_PLAIN",
    "INCOMPAT_CHUNKS",
    "INCOMPAT_DEVICES",
    "INODE",
    "INODE_SIZE",
    "MAGIC",
    "MAX_NAME",
    "NULL",
    "OWNERS",
    "SLOT",
    "SUPERBLOCK",
    "SUPERBLOCK_AT",
    "checksum",
    "decode_rdev",
    "encode_rdev",
]

BLOCK: Final = 4096
SLOT: Final = 32
"""Inodes begin at multiples of it."""

MAGIC: Final = 0xE0F5E1E2
SUPERBLOCK_AT: Final = 1024
CHECKSUMMED: Final = 1
COMPAT: Final = CHECKSUMMED | 2
"""Features that a reader may ignore: a checksum of the first block; times are of modification."""
INCOMPAT_CHUNKS: Final = 0x4
INCOMPAT_DEVICES: Final = 0x8

SUPERBLOCK: Final = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
"""magic, checksum, compat, block size's log, extension slots, root's nid, inodes, build time, its ns, blocks, inodes' block, shared
xattrs' block, uuid, name, incompat, compression, devices, devices' first slot, folder block's log, long prefixes, their place, packed
inode."""

DEVICES_AT: Final = SUPERBLOCK_AT + SUPERBLOCK.size
DEVICE_SLOT: Final = struct.Struct("<64sII56x")
"""tag, blocks, 0."""
DEVICES: Final = 256
"""Packs that one image may refer to; a mount has an option for each."""

INODE: Final = struct.Struct("<HHHHQIIIIqII16x")
"""format, xattrs' length, mode, 0, size, address (or rdev, or the chunks' format), number for 32-bit stat, uid, gid, mtime, ns, links."""
INODE_SIZE: Final = INODE.size
EXTENDED: Final = 1
FLAT_PLAIN: Final = 0
FLAT_INLINE: Final = 2
CHUNKED: Final = 4
CHUNK_BITS_LIMIT: Final = 31
CHUNK_INDEXES: Final = 0x20
"""Of the chunks' format: with device numbers."""
CHUNK: Final = struct.Struct("<HHI")
"""0, device (the image is 0, packs count from 1), address."""
CHUNK_SIZE: Final = CHUNK.size
NULL: Final = 0xFFFFFFFF

DIRENT: Final = struct.Struct("<QHBx")
"""nid, the name's place in the block, type."""
DIRENT_SIZE: Final = DIRENT.size
MAX_NAME: Final = 255
OWNERS: Final = (1 << 32) - 1
"""Users and groups; the last number means none."""

FILE_TYPES: Final = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC32C: Final = _crc32c_table()


def checksum(first_block: bytes | bytearray | memoryview) -> int:
    """CRC-32C (Castagnoli, reflected, not inverted at the end) from the superblock to its block's end, its own field taken as 0."""
    value = 0xFFFFFFFF
    for byte in bytes(first_block[SUPERBLOCK_AT : SUPERBLOCK_AT + 4]) + bytes(4) + bytes(first_block[SUPERBLOCK_AT + 8 : BLOCK]):
        value = (value >> 8) ^ _CRC32C[(value ^ byte) & 0xFF]
    return value


def encode_rdev(rdev: int) -> int:
    """A device number as the kernel keeps it in 32 bits: 12 for the major, 20 for the minor. Raises ValueError."""
    major, minor = ((rdev >> 32) & 0xFFFFF000) | ((rdev >> 8) & 0xFFF), ((rdev >> 12) & 0xFFFFFF00) | (rdev & 0xFF)
    if rdev < 0 or major >= 1 << 12 or minor >= 1 << 20:
        raise ValueError(f"device number {rdev:#x}: the major must be below 4096 and the minor below 1048576")
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def decode_rdev(value: int) -> int:
    """The device number as stat(2) gives it."""
    major, minor = (value >> 8) & 0xFFF, (value & 0xFF) | ((value >> 12) & 0xFFF00)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)
