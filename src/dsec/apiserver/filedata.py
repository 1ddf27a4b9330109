"""Bytes of files between descriptors and HTTP bodies, in bounded memory and off the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

from libdsec.errors import DSecError, QuotaExceeded
from libdsec.threads import in_own_thread

__all__ = ["CHUNK_BYTES", "read_pieces", "write_all", "write_failure", "write_pieces"]

T = TypeVar("T")
CHUNK_BYTES = 1 << 20


class _Lane:
    """Blocking calls on one file, each in a thread that nobody else waits for: a file may be on a store that hangs.

    The descriptor is a copy, closed when the last call has returned, so that whoever leaves need not wait for that, and whoever closes
    his own does not give its number to another file under a call that still runs.
    """

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._last: asyncio.Future[Any] | None = None

    def begin(self, call: Callable[[int], T]) -> asyncio.Future[T]:
        """Start a call; the one before has returned. Wait for the future by `asyncio.shield` only: it must be done when the call is."""
        self._last = future = in_own_thread(partial(call, self._fd))
        return future

    def leave(self) -> None:
        """No more calls."""
        if self._last is None:
            os.close(self._fd)
        elif self._last.done():
            self._close(self._last)
        else:
            self._last.add_done_callback(self._close)

    def _close(self, last: asyncio.Future[Any]) -> None:
        # Looked at, so that asyncio does not report a failure that nobody waits for.
        last.exception()
        os.close(self._fd)


async def read_pieces(fd: int, start: int, end: int | None) -> AsyncGenerator[bytes, None]:
    """Bytes from `start` to `end`, or to the end of file; the next piece is read while the last is sent.

    Raises where the file became shorter than `end`: a body that ends early must not look complete.
    """
    offset = start
    lane = _Lane(fd)
    try:
        ahead = lane.begin(partial(_read, offset, _want(offset, end)))
        while True:
            piece = await asyncio.shield(ahead)
            offset += len(piece)
            want = _want(offset, end)
            if not piece or not want:
                if piece:
                    yield piece
                break
            ahead = lane.begin(partial(_read, offset, want))
            yield piece
    finally:
        lane.leave()
    if end is not None and offset < end:
        raise DSecError(f"the file became shorter while it was read: {offset} of {end} bytes", ran="ran", cause="truncated")


def _want(offset: int, end: int | None) -> int:
    return CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - offset)


def _read(offset: int, size: int, fd: int) -> bytes:
    return os.pread(fd, size, offset)


async def write_pieces(fd: int, pieces: AsyncIterator[bytes]) -> int:
    """Write all to the descriptor from its position on; returns the count. Raises QuotaExceeded where the disk is full.

    Left early, one last write may still be under way.
    """
    total = 0
    gathered: list[bytes] = []
    size = 0
    lane = _Lane(fd)
    writing: asyncio.Future[None] | None = None
    try:
        async for piece in pieces:
            gathered.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                if writing is not None:
                    await asyncio.shield(writing)
                writing = lane.begin(partial(_write, gathered))
                total += size
                gathered, size = [], 0
        if writing is not None:
            await asyncio.shield(writing)
        if gathered:
            await asyncio.shield(lane.begin(partial(_write, gathered)))
            total += size
    except OSError as error:
        raise write_failure(error) from error
    finally:
        lane.leave()
    return total


def _write(pieces: list[bytes], fd: int) -> None:
    write_all(fd, pieces)


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
