"""Conversations about one command: waiting for its result, and watching it live."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import ClassVar, Final

from dsec.backends.container import wire
from dsec.backends.container.conversation import Conversation
from dsec.backends.container.failures import channel_closed, error_from_fields
from dsec.backends.container.frames import (
    Fields,
    Frame,
    MalformedFrame,
    decode_number,
    encode_data,
    encode_fields,
    encode_frame,
    encode_number,
)
from dsec.backends.container.requests import Output
from dsec.backends.protocol import OutputChunk, StreamEnd
from libdsec.errors import Conflict, DSecError
from libdsec.schema import ExecResult

__all__ = ["CommandConversation", "ContainerAttachment"]

STDIN_CHUNK: Final = 256 << 10


class CommandConversation(Conversation):
    """Waits for one result. `result` is done when EXITED came, or failed with the reason; output is gathered, bounded by the request.

    Chronus enforces the time limit itself; `limit_seconds`, where there is one, only catches an aether that hangs. Without one the wait
    ends with the command or with the connection, since no answer comes before the end. After a result the connection stays open, so that
    `acknowledge` costs one frame; the holder closes it.
    """

    kill_slack_seconds: ClassVar[float] = 60.0

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        path: str,
        op_id: str,
        *,
        limit_seconds: float | None,
        stdin: bytes | None = None,
        first: bytes = b"",
    ) -> None:
        super().__init__(loop, sock, path, first=first)
        self._op_id = op_id
        self._output = Output()
        self._stdin = memoryview(stdin) if stdin is not None else None
        self.result: asyncio.Future[ExecResult] = loop.create_future()
        self._timer = None if limit_seconds is None else loop.call_later(limit_seconds + self.kill_slack_seconds, self._late)

    def _frame(self, frame: Frame) -> None:
        kind = frame[0]
        if kind == wire.DATA:
            if frame[1] != wire.STDIN:
                self._output.add(frame)
        elif kind == wire.EXITED:
            if self._timer is not None:
                self._timer.cancel()
            if not self.result.done():
                self.result.set_result(self._output.result(self._op_id, Fields(frame[2])))
        elif kind == wire.CREDIT:
            self._feed_stdin(decode_number(frame[2]))
        elif kind == wire.ERROR:
            error = error_from_fields(Fields(frame[2]))
            self.close()
            self._lost(error)
        elif kind == wire.EOF:
            if frame[1] == wire.STDIN:
                self._stdin = None
        elif kind != wire.STARTED:
            raise MalformedFrame(f"kind {kind} has no place in a command's conversation")

    def _feed_stdin(self, credit: int) -> None:
        stdin = self._stdin
        while stdin is not None and credit > 0:
            piece = stdin[: min(credit, STDIN_CHUNK)]
            self.send(encode_data(wire.STDIN, 0, piece))
            credit -= len(piece)
            stdin = stdin[len(piece) :]
            if not stdin:
                self.send(encode_frame(wire.EOF))
                stdin = None
        self._stdin = stdin

    def _lost(self, error: DSecError) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def acknowledge(self, payload: bytes) -> bool:
        """Say that the result is recorded, and hang up; False if the connection was gone. The frame arrives before the end does."""
        if self.closed:
            return False
        self.send(encode_frame(wire.ACK, payload))
        self.close()
        return True

    def _late(self) -> None:
        self.close()
        self._lost(channel_closed("aether gave no result though the command's time was up long ago", "unknown"))

    def close(self) -> None:
        super().close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ContainerAttachment(Conversation):
    """A live view of one command: dsec.backends.protocol.Attachment. What is buffered here never exceeds the credit given."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        path: str,
        op_id: str,
        *,
        credit: int,
        stdout_offset: int,
        stderr_offset: int,
    ) -> None:
        super().__init__(loop, sock, path)
        self._op_id = op_id
        self._output = Output(keep=False)
        self._output.skip_to(wire.STDOUT, stdout_offset)
        self._output.skip_to(wire.STDERR, stderr_offset)
        self._items: deque[OutputChunk | StreamEnd | ExecResult] = deque()
        self._error: DSecError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._owed = [0, 0]
        self._grant = max(1, credit // 4)
        self._stdin_credit = 0
        self._stdin_open = True
        self._stdin_waiter: asyncio.Future[None] | None = None
        self._wrote = False
        self._parting: asyncio.Future[None] | None = None
        self._finished = False
        self.started: asyncio.Future[Fields] = loop.create_future()
        self._timer = loop.call_later(self.answer_seconds, self._late)

    def _frame(self, frame: Frame) -> None:
        kind, stream, payload, offset = frame
        if kind == wire.DATA:
            self._output.add(frame)
            self._items.append(OutputChunk(stream, offset, payload))
            self._wake()
        elif kind == wire.EOF:
            if stream == wire.STDIN:
                self._end_stdin()
            else:
                self._items.append(StreamEnd(stream))
                self._wake()
        elif kind == wire.CREDIT:
            self._stdin_credit += decode_number(payload)
            self._wake_stdin()
        elif kind == wire.EXITED:
            self._items.append(self._output.result(self._op_id, Fields(payload)))
            self._finished = True
            self.close()
            self._wake()
        elif kind == wire.STARTED:
            self._timer.cancel()
            if not self.started.done():
                self.started.set_result(Fields(payload))
        elif kind == wire.ERROR:
            error = error_from_fields(Fields(payload))
            self.close()
            self._lost(error)
        else:
            raise MalformedFrame(f"kind {kind} has no place in an attachment")

    def _lost(self, error: DSecError) -> None:
        self._error = error
        if not self.started.done():
            self.started.set_exception(error)
        self._end_stdin()
        self._wake()

    def _late(self) -> None:
        self.close()
        self._lost(channel_closed(f"aether did not answer within {self.answer_seconds:g} s", "unknown"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wake_stdin(self) -> None:
        if self._stdin_waiter is not None and not self._stdin_waiter.done():
            self._stdin_waiter.set_result(None)

    def _end_stdin(self) -> None:
        self._stdin_open = False
        self._wake_stdin()

    def __aiter__(self) -> ContainerAttachment:
        return self

    async def __anext__(self) -> OutputChunk | StreamEnd | ExecResult:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    async def consumed(self, stream: int, count: int) -> None:
        """Give credit back, in steps of a quarter of the first grant: chronus then always holds at least three."""
        self._owed[stream - 1] += count
        if self._owed[stream - 1] >= self._grant:
            self.send(encode_number(wire.CREDIT, stream, self._owed[stream - 1]))
            self._owed[stream - 1] = 0

    async def write_stdin(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            while self._stdin_credit <= 0 and self._stdin_open and not self.closed:
                self._stdin_waiter = self._loop.create_future()
                try:
                    await self._stdin_waiter
                finally:
                    self._stdin_waiter = None
            if not self._stdin_open or self.closed:
                raise Conflict("stdin of the command is closed", cause="stdin-closed", details={"unwritten": len(rest)})
            piece = rest[: min(self._stdin_credit, STDIN_CHUNK)]
            self._stdin_credit -= len(piece)
            self._wrote = True
            self.send(encode_data(wire.STDIN, 0, piece))
            rest = rest[len(piece) :]
            await self.drain()

    async def close_stdin(self) -> None:
        if self._stdin_open and not self.closed:
            self._end_stdin()
            self._wrote = True
            self.send(encode_frame(wire.EOF))
            await self.drain()

    async def signal(self, signum: int, *, tree: bool) -> None:
        self._require_live()
        self.send(encode_frame(wire.SIGNAL, encode_fields([(wire.T_SIGNUM, signum), (wire.T_TREE, int(tree))])))

    async def resize(self, rows: int, cols: int) -> None:
        self._require_live()
        self.send(encode_frame(wire.RESIZE, encode_fields([(wire.T_ROWS, rows), (wire.T_COLS, cols)])))

    def _require_live(self) -> None:
        if self._finished:
            raise Conflict("the command has ended", cause="exited")
        if self.closed:
            raise self._error or Conflict("the attachment is closed", cause="detached")

    async def aclose(self) -> None:
        """Hang up, once chronus has read all input that was sent.

        A connection that it finds broken while it sends output it drops, with what it has not read; so ours ends one way first.
        """
        try:
            if self._wrote and not self.closed:
                self._parting = self._loop.create_future()
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
                await asyncio.wait([self._parting], timeout=self.answer_seconds)
        finally:
            self.close()

    def _end(self, what: str) -> None:
        if self._parting is None:
            super()._end(what)
        else:
            self.close()

    def close(self) -> None:
        super().close()
        self._timer.cancel()
        self._wake()
        self._wake_stdin()
        if self._parting is not None and not self._parting.done():
            self._parting.set_result(None)
