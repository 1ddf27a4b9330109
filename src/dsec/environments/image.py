"""From a folder to an EROFS image with its data apart, the same bytes for the same tree."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from dsec.environments.tools import run_tool

__all__ = ["build_image", "crc32c", "pin_build_time"]

_SUPERBLOCK: Final = 1024
_MAGIC: Final = 0xE0F5E1E2
_CHECKSUM_FEATURE: Final = 1
_UUID: Final = "00000000-0000-0000-0000-000000000000"
_CHUNK: Final = 4096
"""A page: equal pages of a layer are stored once, and no read brings more than was asked for."""


def build_image(tree: Path, metadata: Path, data: Path) -> None:
    """Write the image of `tree`: owners, modes, times, hard links, xattrs, devices as they are.

    mkfs.erofs 1.5 either keeps the times of files or leaves its own clock out of the superblock, never both: so it keeps them, and the
    clock is taken out afterwards.
    """
    run_tool(
        [
            "mkfs.erofs", "--quiet", "--preserve-mtime", "-U", _UUID, "-x1", f"--chunksize={_CHUNK}", f"--blobdev={data}",
            str(metadata), str(tree),
        ],
    )  # fmt: skip
    pin_build_time(metadata)


def pin_build_time(image: Path) -> None:
    """Set the superblock's time of making to zero and make its checksum right again. Raises ValueError if it was not right before."""
    with image.open("r+b") as file:
        block = bytearray(file.read(4096))
        if len(block) < _SUPERBLOCK + 128 or struct.unpack_from("<I", block, _SUPERBLOCK)[0] != _MAGIC:
            raise ValueError(f"{image.name} is no EROFS image")
        features = struct.unpack_from("<I", block, _SUPERBLOCK + 8)[0]
        if features & _CHECKSUM_FEATURE:
            found = struct.unpack_from("<I", block, _SUPERBLOCK + 4)[0]
            if found != _checksum(block):
                raise ValueError(f"the checksum of the superblock of {image.name} is not one that we know how to make")
        struct.pack_into("<QI", block, _SUPERBLOCK + 24, 0, 0)
        if features & _CHECKSUM_FEATURE:
            struct.pack_into("<I", block, _SUPERBLOCK + 4, _checksum(block))
        file.seek(0)
        file.write(block)


def _checksum(block: bytearray) -> int:
    """Over the superblock to the end of its block, the checksum's own field as zero."""
    covered = bytearray(block[_SUPERBLOCK:])
    struct.pack_into("<I", covered, 4, 0)
    return crc32c(bytes(covered))


def crc32c(data: bytes, value: int = 0xFFFFFFFF) -> int:
    """Castagnoli's CRC without the final inversion, as the kernel's crc32c() gives it."""
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value
