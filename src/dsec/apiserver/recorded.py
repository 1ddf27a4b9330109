"""A recorded result, streamed as if it were live: for who attaches to a command that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dsec.backends.protocol import OutputChunk, StreamEnd
from libdsec.errors import Conflict
from libdsec.schema import ExecResult

__all__ = ["Recorded"]

PIECE_BYTES = 256 << 10


class Recorded:
    """Keeps dsec.backends.protocol.Attachment over an ExecResult: the same offsets, the same credit, a jump where output was dropped."""

    def __init__(self, result: ExecResult, offsets: tuple[int, int], credit: int) -> None:
        self._result = result
        self._offsets = {1: offsets[0], 2: offsets[1]}
        self._credit = {1: credit, 2: credit}
        self._granted = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[OutputChunk | StreamEnd | ExecResult]:
        result = self._result
        kept = {1: (result.stdout, result.stdout_dropped), 2: (result.stderr, result.stderr_dropped)}
        for stream, (data, dropped) in kept.items():
            head = len(data) // 2 if dropped else len(data)
            for start, part in ((0, data[:head]), (head + dropped, data[head:])):
                async for chunk in self._part(stream, start, part):
                    yield chunk
            yield StreamEnd(stream)
        yield result

    async def _part(self, stream: int, start: int, part: bytes) -> AsyncIterator[OutputChunk]:
        position = max(0, self._offsets[stream] - start)
        while position < len(part):
            while self._credit[stream] <= 0:
                self._granted.clear()
                await self._granted.wait()
            piece = part[position : position + min(PIECE_BYTES, self._credit[stream])]
            self._credit[stream] -= len(piece)
            yield OutputChunk(stream, start + position, piece)
            position += len(piece)

    async def consumed(self, stream: int, count: int) -> None:
        self._credit[stream] += count
        self._granted.set()

    async def write_stdin(self, data: bytes) -> None:
        raise Conflict("the command has ended", cause="exited")

    async def close_stdin(self) -> None:
        return

    async def signal(self, signum: int, *, tree: bool) -> None:
        raise Conflict("the command has ended", cause="exited")

    async def resize(self, rows: int, cols: int) -> None:
        return

    async def aclose(self) -> None:
        return
