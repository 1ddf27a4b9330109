"""Blocking work that lasts, beside the event loop.

It gets a thread of its own: a shared pool of few threads, all taken by work that waits for other work in the pool, would never go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["PipeReader", "PipeWriter", "WriterGone", "in_own_thread"]

T = TypeVar("T")
PIPE_BLOCKS = 8


def in_own_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a new thread; the future has its outcome. Cancelling the future does not end the thread: `work` must end by itself."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            # The loop closed first: nobody is left to be told.
            return

    threading.Thread(target=run, name="dsec-work", daemon=True).start()
    return outcome


class PipeReader:
    """A blocking file object for a thread, over pieces that a coroutine feeds; at most PIPE_BLOCKS pieces wait between them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: SimpleQueue[bytes] = SimpleQueue()
        self._room = asyncio.Semaphore(PIPE_BLOCKS)
        self._rest = b""
        self._ended = False
        self._stopped = False

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end."""
        found: list[bytes] = []
        while size > 0:
            if not self._rest:
                if self._ended:
                    break
                self._rest = self._pieces.get()
                self._ended = not self._rest
                self._loop.call_soon_threadsafe(self._room.release)
                continue
            piece, self._rest = self._rest[:size], self._rest[size:]
            found.append(piece)
            size -= len(piece)
        return found[0] if len(found) == 1 else b"".join(found)

    async def feed(self, pieces: AsyncIterator[bytes]) -> None:
        """Hand over all pieces as fast as the reader takes them. However it ends, the reader then sees the end."""
        try:
            async for piece in pieces:
                if piece:
                    await self._room.acquire()
                if self._stopped:
                    return
                if piece:
                    self._pieces.put(piece)
        finally:
            self._pieces.put(b"")

    def stop(self) -> None:
        """The reader is done, from its thread: a feeder that waits for room goes on and ends."""
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._stopped = True
        self._room.release()


class WriterGone(Exception):
    """Raised in the writing thread: nobody reads any more."""


class PipeWriter:
    """The other way: a thread writes, a coroutine iterates."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._blocks: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = threading.Semaphore(PIPE_BLOCKS)
        self._gone = False

    def write(self, data: bytes) -> int:
        """Waits while the reader is behind; WriterGone when it left."""
        if not data:
            return 0
        self._room.acquire()
        if self._gone:
            raise WriterGone
        self._loop.call_soon_threadsafe(self._blocks.put_nowait, bytes(data))
        return len(data)

    def end(self) -> None:
        """No more comes."""
        self._loop.call_soon_threadsafe(self._blocks.put_nowait, b"")

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """What was written, until end()."""
        try:
            while block := await self._blocks.get():
                self._room.release()
                yield block
        finally:
            self._gone = True
            self._room.release(PIPE_BLOCKS)
