"""Pieces of kept output by absolute offset, of commands that have ended and of such as run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from dsec.backends.protocol import Channel, OutputChunk, StreamEnd
from dsec.edge.sandbox import Operation
from libdsec.errors import Conflict
from libdsec.schema import ExecResult, StreamOutput

__all__ = ["RecordedAttachment", "kept_output", "live_output"]

CHUNK_BYTES = 256 << 10
QUIET_SECONDS = 0.05
"""A running command that sent nothing for so long has, for now, no more."""


def kept_output(result: ExecResult, stream: int, offset: int, limit: int) -> StreamOutput:
    """From a result: its first half of the kept bytes begins the stream, the other half ends it, `dropped` bytes lie between."""
    kept, total, dropped = (
        (result.stdout, result.stdout_bytes, result.stdout_dropped)
        if stream == 1
        else (result.stderr, result.stderr_bytes, result.stderr_dropped)
    )
    head = len(kept) if dropped == 0 else len(kept) // 2
    if offset < head:
        data = kept[offset : min(head, offset + limit)]
        return StreamOutput(data=data, offset=offset, next_offset=offset + len(data), eof=offset + len(data) >= total)
    start = max(offset, head + dropped)
    data = kept[start - dropped : start - dropped + limit]
    return StreamOutput(data=data, offset=start, next_offset=start + len(data), gap=start - offset, eof=start + len(data) >= total)


async def live_output(channel: Channel, op: Operation, stream: int, offset: int, limit: int) -> StreamOutput:
    """What a running command has written so far, from `offset`."""
    offsets = {"stdout_offset": offset} if stream == 1 else {"stderr_offset": offset}
    attachment = await channel.attach(op.op_id, session_id=op.session_id, credit=limit, **offsets)
    pieces: list[bytes] = []
    size, eof = 0, False
    begin: int | None = None
    chunks = attachment.__aiter__()
    try:
        while size < limit:
            async with asyncio.timeout(QUIET_SECONDS):
                item = await anext(chunks)
            match item:
                case OutputChunk() if item.stream == stream:
                    if begin is not None and item.offset != begin + size:
                        break
                    begin = item.offset if begin is None else begin
                    pieces.append(item.data)
                    size += len(item.data)
                case StreamEnd() if item.stream == stream:
                    eof = True
                    break
                case ExecResult():
                    eof = True
                    break
    except (TimeoutError, StopAsyncIteration):
        pass
    finally:
        await attachment.aclose()
    data = b"".join(pieces)[:limit]
    begin = offset if begin is None else begin
    complete = eof and begin + len(data) == begin + size
    return StreamOutput(data=data, offset=begin, next_offset=begin + len(data), gap=begin - offset, eof=complete)


class RecordedAttachment:
    """An Attachment to a command that has ended: its kept output, then its result. There is nothing to write to or to signal."""

    def __init__(self, result: ExecResult, offsets: dict[int, int]) -> None:
        self._result = result
        self._offsets = offsets

    async def __aiter__(self) -> AsyncIterator[OutputChunk | StreamEnd | ExecResult]:
        for stream, offset in self._offsets.items():
            while True:
                piece = kept_output(self._result, stream, offset, CHUNK_BYTES)
                if piece.data:
                    yield OutputChunk(stream, piece.offset, piece.data)
                if piece.eof or not piece.data:
                    break
                offset = piece.next_offset
            yield StreamEnd(stream)
        yield msgspec.structs.replace(self._result, stdout=b"", stderr=b"")

    async def consumed(self, stream: int, count: int) -> None:
        """The reader paces itself by iterating."""

    async def write_stdin(self, data: bytes) -> None:
        """Conflict."""
        raise self._ended()

    async def close_stdin(self) -> None:
        """It is closed."""

    async def signal(self, signum: int, *, tree: bool) -> None:
        """Conflict."""
        raise self._ended()

    async def resize(self, rows: int, cols: int) -> None:
        """Nobody sees it."""

    async def aclose(self) -> None:
        """Nothing is held."""

    def _ended(self) -> Conflict:
        return Conflict(f"operation {self._result.op_id} has ended", cause="exited")
