"""The client's end of a process's stream: one WebSocket, reconnected where the server was lost, with credit both ways."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import msgspec

from libdsec import streaming
from libdsec.api import Api, Backoff, decode_error
from libdsec.bodies import stdin_bytes
from libdsec.errors import Conflict, ConnectionFailed, DSecError, OutcomeUnknown
from libdsec.schema import ExecResult, SignalRequest
from libdsec.shielding import finish
from libdsec.transport import WebSocket

__all__ = ["ProcessStream", "kept_from"]

MESSAGEPACK = "application/vnd.msgpack"
STDIN_PIECE = 256 << 10
_PARTING_SECONDS = 5.0
"""How long leaving waits for a process that does not read its input. The server goes on giving it what it was sent."""
_result_decoder = msgspec.msgpack.Decoder(ExecResult)


class ProcessStream:
    """Live output, input, signals and terminal size of one process. Use `async with`, or open() and aclose().

    Iterate for `(stream, data)`; iteration ends when the process did, with `result` set (without output, which went by). What is not read
    stays within the credit, and the server sends no more. Where the server is lost the stream is taken up again at its offset; input that
    was on its way then is of unknown fate, and writing more raises OutcomeUnknown.
    """

    result: ExecResult | None
    dropped: dict[int, int]
    """Bytes of each stream that were too old to be kept when they were asked for, or too many."""

    def __init__(
        self, api: Api, path: str, *, stdout_offset: int = 0, stderr_offset: int = 0, credit: int = streaming.DEFAULT_CREDIT
    ) -> None:
        self._api = api
        self._path = path
        self._offsets = {1: stdout_offset, 2: stderr_offset}
        self._credit = credit
        self._grant = max(1, credit // 4)
        self._owed = {1: 0, 2: 0}
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._wake: asyncio.Event = asyncio.Event()
        self._failure: DSecError | None = None
        self._socket: WebSocket | None = None
        self._connection = AsyncExitStack()
        self._reader: asyncio.Task[None] | None = None
        self._stdin_credit = streaming.STDIN_WINDOW
        self._stdin_arrived = asyncio.Event()
        self._stdin_lost = False
        self._stdin_ended = False
        self.result = None
        self.dropped = {1: 0, 2: 0}

    async def open(self) -> ProcessStream:
        """Connect. Raises the server's error where the process is not known."""
        await self._connect()
        self._reader = asyncio.get_running_loop().create_task(self._read())
        return self

    async def aclose(self) -> None:
        """Detach. The process goes on, and gets all input that was accepted, also where leaving did not wait until it had read it."""
        try:
            await self._input_taken()
        finally:
            await self._disconnect()

    async def _disconnect(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._connection.aclose()
        self._socket = None
        if self.result is None and self._failure is None:
            self._failure = Conflict("the stream is closed", cause="detached")
        self._wake.set()
        self._stdin_arrived.set()

    async def _input_taken(self) -> None:
        """Wait until the process has our input, so that what another stream sends next comes after it; within limits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PARTING_SECONDS):
                while self._on_the_way():
                    self._stdin_arrived.clear()
                    await self._stdin_arrived.wait()

    def _on_the_way(self) -> bool:
        """Whether the server may still tell of input that it has given to the process."""
        broken = self.result is not None or self._failure is not None or self._stdin_lost
        return not broken and self._socket is not None and self._stdin_credit < streaming.STDIN_WINDOW

    async def __aenter__(self) -> ProcessStream:
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await finish(self.aclose())

    async def _connect(self) -> None:
        await self._connection.aclose()
        target = f"{self._path}/stream?stdout_offset={self._offsets[1]}&stderr_offset={self._offsets[2]}&credit={self._credit}"
        # What waits here unread counts against the new connection's credit too.
        waiting = {1: 0, 2: 0}
        for stream, data in self._pieces:
            waiting[stream] += len(data)
        self._socket = await self._connection.enter_async_context(self._api.transport.websocket(target))
        self._owed = {1: -waiting[1], 2: -waiting[2]}

    async def _read(self) -> None:
        progress = -1
        try:
            while self.result is None:
                try:
                    await self._read_messages()
                except (ConnectionFailed, OutcomeUnknown) as error:
                    # The server lost its own end, dropped us for standing still, or was lost. What was kept can be had from where we are.
                    standing = sum(self._offsets.values()) == progress
                    progress = sum(self._offsets.values())
                    if standing and await self._take_record():
                        return
                    if isinstance(error, ConnectionFailed):
                        await self._reconnect(error)
                    elif standing:
                        raise
                    else:
                        await self._reconnect(ConnectionFailed(error.message, ran="unknown", cause=error.cause))
        except DSecError as error:
            self._failure = error
        finally:
            self._wake.set()
            self._stdin_arrived.set()
            # Nothing more comes: a handle that nobody closes holds no connection.
            await self._connection.aclose()

    async def _read_messages(self) -> None:
        assert self._socket is not None, "open() connects first"
        receive = self._socket.receive
        while True:
            message = await receive()
            if message is None:
                raise ConnectionFailed("the server closed the stream", ran="unknown", cause="closed")
            kind = message[0]
            if kind == streaming.DATA:
                self._take(*streaming.decode_data(message))
            elif kind == streaming.STDIN_CREDIT:
                self._stdin_credit += streaming.decode_stdin_credit(message)
                self._stdin_arrived.set()
            elif kind == streaming.RESULT:
                self.result = _result_decoder.decode(memoryview(message)[1:])
                return
            elif kind == streaming.ERROR:
                raise decode_error(500, message[1:], MESSAGEPACK)

    async def _take_record(self) -> bool:
        """Go on from the record of a process that has ended, to the result; False where it runs or nobody answers."""
        try:
            result = await self._api.once("GET", f"{self._path}/result", ExecResult, timeout=self._api.timeouts.request)
        except ConnectionFailed:
            return False
        except Conflict as error:
            if error.cause != "running":
                raise
            return False
        for stream, kept, total in ((1, result.stdout, result.stdout_bytes), (2, result.stderr, result.stderr_bytes)):
            for offset, data in kept_from(kept, total, self._offsets[stream]):
                self._take(stream, offset, data)
            self._take(stream, max(total, self._offsets[stream]), b"")
        self.result = msgspec.structs.replace(result, stdout=b"", stderr=b"")
        return True

    def _take(self, stream: int, offset: int, data: bytes) -> None:
        self.dropped[stream] += offset - self._offsets[stream]
        self._offsets[stream] = offset + len(data)
        if data:
            self._pieces.append((stream, data))
            self._wake.set()

    async def _reconnect(self, error: ConnectionFailed) -> None:
        if self._stdin_credit < streaming.STDIN_WINDOW:
            self._stdin_lost = True
            self._stdin_arrived.set()
        backoff = Backoff(self._api.timeouts.reconnect)
        while await backoff.pause():
            try:
                await self._connect()
            except ConnectionFailed as again:
                error = again
                continue
            self._stdin_credit = streaming.STDIN_WINDOW
            self._stdin_arrived.set()
            return
        raise error

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                yield piece
                await self._consumed(*piece)
            if self.result is not None:
                return
            if self._failure is not None:
                raise self._failure
            self._wake.clear()
            await self._wake.wait()

    async def _consumed(self, stream: int, data: bytes) -> None:
        self._owed[stream] += len(data)
        if self._owed[stream] >= self._grant and self._socket is not None and self.result is None:
            count, self._owed[stream] = self._owed[stream], 0
            # A connection that broke meanwhile is the reader's to mend; the next one begins with full credit.
            with contextlib.suppress(ConnectionFailed):
                await self._socket.send(streaming.encode_credit(stream, count))

    async def drain(self) -> None:
        """Read and drop all output until the process ends."""
        async for _ in self:
            pass

    async def write_stdin(self, data: bytes | str) -> None:
        """Send input; waits while the process does not read it. Conflict after close_stdin() or when the process has ended."""
        rest = memoryview(stdin_bytes(data) if isinstance(data, str) else data)
        if self._stdin_ended:
            raise Conflict("stdin was closed before", cause="stdin-closed")
        while rest:
            self._writable()
            if self._stdin_credit <= 0:
                self._stdin_arrived.clear()
                await self._stdin_arrived.wait()
                continue
            piece = rest[: min(self._stdin_credit, STDIN_PIECE)]
            self._stdin_credit -= len(piece)
            try:
                await self._send(bytes([streaming.STDIN]) + piece)
            except ConnectionFailed as error:
                raise OutcomeUnknown("the connection broke while input was being sent", cause="stdin") from error
            rest = rest[len(piece) :]

    def _writable(self) -> WebSocket:
        if self.result is not None:
            raise Conflict("the process has ended", cause="exited")
        if self._failure is not None:
            raise self._failure
        if self._stdin_lost:
            raise OutcomeUnknown("input was lost on the way with the server; how much of it arrived is not known", cause="stdin")
        if self._socket is None:
            raise Conflict("the stream is not open", cause="detached")
        return self._socket

    async def _send(self, message: bytes) -> None:
        try:
            await self._writable().send(message)
        except ConnectionFailed:
            # What ended the stream meanwhile is the reason, if something did.
            self._writable()
            raise

    async def close_stdin(self) -> None:
        """End of input. Once is enough; again is no error, nor is it when the process has ended."""
        if not self._stdin_ended and self.result is None:
            self._stdin_ended = True
            try:
                await self._send(bytes([streaming.STDIN_EOF]))
            except Conflict:
                if self.result is None:
                    raise

    async def signal(self, signal: int | str, *, tree: bool = False) -> None:
        """Send a signal in order with the input. See Process.signal() for one that is answered."""
        body = msgspec.msgpack.encode(SignalRequest(signal=signal, tree=tree))
        await self._send(bytes([streaming.SIGNAL]) + body)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell the terminal's size."""
        await self._send(streaming.encode_resize(rows, cols))


def kept_from(kept: bytes, total: int, offset: int) -> Iterator[tuple[int, bytes]]:
    """What a record keeps of a stream from `offset` on: where bytes are missing, its halves are the stream's beginning and end."""
    head = len(kept) if len(kept) >= total else len(kept) // 2
    for start, data in ((0, kept[:head]), (total - len(kept) + head, kept[head:])):
        skipped = max(0, offset - start)
        if skipped < len(data):
            yield start + skipped, data[skipped:]
