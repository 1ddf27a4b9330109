"""Files that are there wholly or not at all, also after a crash of the host: write aside, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

from dsec.environments.manifest import FileDigest

__all__ = ["copy_verified", "digest_file", "sync_file", "sync_folder", "write_durably"]

_CHUNK = 128 << 10
"""Larger buffers leave the processor's cache, and are new memory each time."""


def sync_folder(path: Path) -> None:
    """fsync a folder: names made or moved in it stay."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """fsync a file that somebody else wrote."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _replacing(path: Path, aside: Path, *, durable: bool) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well; else nothing of it stays."""
    fresh = aside / f"{path.name}.{secrets.token_hex(4)}"
    try:
        with fresh.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_durably(path: Path, data: bytes, *, aside: Path) -> None:
    """Replace `path` by `data`, written first in the folder `aside` of the same file system: a leased one, which a sweep removes."""
    with _replacing(path, aside, durable=True) as file:
        file.write(data)


def digest_file(path: Path, progress: Callable[[int], None] | None = None) -> FileDigest:
    """Hash a file; `progress` is told of each piece's length. The pages read are the ones that a first start will want."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if progress is not None:
                progress(count)
    return FileDigest(sha256=digest.hexdigest(), size=size)


def copy_verified(source: Path, target: Path, expected: FileDigest, *, aside: Path, durable: bool = True) -> None:
    """Copy a file, in place only if it is what `expected` says (else ValueError); `aside` as for `write_durably`.

    What is verified at each use and can be had again need not be `durable`: that is several times quicker.
    """
    with source.open("rb", buffering=0) as file, _replacing(target, aside, durable=durable) as copy:
        if _copied(file, copy, expected.size) != expected:
            raise ValueError(f"{source.name} is not what its digest says")


def _copied(source: RawIOBase, target: BinaryIO, size: int) -> FileDigest:
    """Through a buffer that stays in the processor's cache, and not far beyond `size` bytes."""
    digest, copied = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK))
    while copied <= size and (count := source.readinto(buffer)):
        digest.update(buffer[:count])
        copied += count
        target.write(buffer[:count])
    return FileDigest(sha256=digest.hexdigest(), size=copied)
