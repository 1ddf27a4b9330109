"""Bytes of files between descriptors and HTTP bodies, in bounded memory and off the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator

from libdsec.errors import DSecError, QuotaExceeded

__all__ = ["CHUNK_BYTES", "read_pieces", "write_all", "write_failure", "write_pieces"]

CHUNK_BYTES = 1 << 20


async def read_pieces(fd: int, start: int, end: int | None) -> AsyncGenerator[bytes, None]:
    """Bytes from `start` to `end`, or to the end of file; the next piece is read while the last is sent.

    Raises where the file became shorter than `end`: a body that ends early must not look complete.
    """
    offset = start
    ahead = asyncio.ensure_future(asyncio.to_thread(os.pread, fd, _want(offset, end), offset))
    try:
        while True:
            piece = await ahead
            offset += len(piece)
            want = _want(offset, end)
            if not piece or not want:
                if piece:
                    yield piece
                break
            ahead = asyncio.ensure_future(asyncio.to_thread(os.pread, fd, want, offset))
            yield piece
    finally:
        # A thread still in pread uses the descriptor: the caller closes it after this only.
        while not ahead.done():
            try:
                await asyncio.shield(ahead)
            except asyncio.CancelledError:
                continue
            except OSError:
                break
    if end is not None and offset < end:
        raise DSecError(f"the file became shorter while it was read: {offset} of {end} bytes", ran="ran", cause="truncated")


def _want(offset: int, end: int | None) -> int:
    return CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - offset)


async def write_pieces(fd: int, pieces: AsyncIterator[bytes]) -> int:
    """Write all to the descriptor from its position on; returns the count. Raises QuotaExceeded where the disk is full."""
    total = 0
    gathered: list[bytes] = []
    size = 0
    writing: asyncio.Future[None] | None = None
    try:
        async for piece in pieces:
            gathered.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                if writing is not None:
                    await writing
                writing = asyncio.ensure_future(asyncio.to_thread(write_all, fd, gathered))
                total += size
                gathered, size = [], 0
        if writing is not None:
            await writing
        if gathered:
            writing = asyncio.ensure_future(asyncio.to_thread(write_all, fd, gathered))
            total += size
            await writing
    except OSError as error:
        raise write_failure(error) from error
    finally:
        while writing is not None and not writing.done():
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                continue
            except OSError:
                break
    return total


def write_all(fd: int, pieces: list[bytes]) -> None:
    """Write the pieces one after another; blocks."""
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(fd, rest) :]


def write_failure(error: OSError) -> DSecError:
    """The typed error of a failed write; the old file, if there was one, is intact."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return QuotaExceeded(f"the sandbox's disk is full: {error.strerror}", field="body", cause="disk")
    return DSecError(f"writing failed: {error.strerror}", cause=errno.errorcode.get(error.errno or 0), ran="not-run")
