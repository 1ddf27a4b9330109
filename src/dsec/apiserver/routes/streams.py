"""The live stream of a process: output as it comes, input, signals, terminal size. The messages are libdsec.streaming's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import msgspec
from litestar import websocket
from litestar.params import FromPath

from dsec.apiserver.channels import Gone, WireSocket, accept, close_with, receive, run_all, run_until_first, send
from dsec.apiserver.failures import typed_error
from dsec.apiserver.state import edge_of, holds_of
from dsec.backends.protocol import Attachment, OutputChunk, StreamEnd
from libdsec import streaming
from libdsec.errors import Conflict, InvalidArgument, OutcomeUnknown
from libdsec.schema import SignalRequest
from libdsec.signals import signal_number

__all__ = ["ROUTES"]

CREDIT_MAX = 64 << 20
_encode = msgspec.msgpack.Encoder().encode
_signal_decoder = msgspec.msgpack.Decoder(SignalRequest)


@websocket("/v1/sandboxes/{sandbox_id:str}/processes/{op_id:str}/stream")
async def stream_process(socket: WireSocket, sandbox_id: FromPath[str], op_id: FromPath[str]) -> None:
    """Attach to a process. Leaving detaches; the process goes on, and gets what input was sent before."""
    try:
        await accept(socket)
        try:
            query = parse_qs(socket.scope["query_string"].decode("latin-1"))
            offsets = (_number(query, "stdout_offset", 0, 1 << 62), _number(query, "stderr_offset", 0, 1 << 62))
            credit = _number(query, "credit", streaming.DEFAULT_CREDIT, CREDIT_MAX)
            held = holds_of(socket).take(sandbox_id, op_id) if offsets == (0, 0) else None
            attachment = held or await edge_of(socket).attach(
                sandbox_id, op_id, stdout_offset=offsets[0], stderr_offset=offsets[1], credit=credit
            )
            try:
                if held is not None and credit:
                    for stream in (1, 2):
                        await held.consumed(stream, credit)
                commands = _Commands(socket, attachment)
                output = _Output(socket, attachment, credit)
                await run_until_first(output.send(), run_all(commands.read(output.discard), commands.feed_stdin()))
            finally:
                await attachment.aclose()
        except Gone:
            return
        except Exception as error:
            await send(socket, bytes([streaming.ERROR]) + _encode(typed_error(error)[0].to_wire()))
        await close_with(socket)
    except Gone:
        return


def _number(query: dict[str, list[str]], name: str, default: int, most: int) -> int:
    text = query.get(name, [str(default)])[-1]
    if not text.isdigit() or int(text) > most:
        raise InvalidArgument(f"{name} is {text!r:.40}, not a number from 0 to {most}", field=name)
    return int(text)


class _Output:
    """What the client is sent. Once it has left, output is read and dropped: the command must not stand still before it took its input."""

    def __init__(self, socket: WireSocket, attachment: Attachment, credit: int) -> None:
        self._socket = socket
        self._attachment = attachment
        self._credit = max(credit, streaming.DEFAULT_CREDIT)
        self._discarding = False

    async def send(self) -> None:
        async for item in self._attachment:
            if isinstance(item, OutputChunk):
                await self._send_chunk(item)
            elif isinstance(item, StreamEnd):
                await self._send(bytes((streaming.EOF, item.stream)))
            else:
                shown = msgspec.structs.replace(item, stdout=b"", stderr=b"")
                await self._send(bytes([streaming.RESULT]) + _encode(shown))
                return
        # The iteration ends with a result or raises; anything else is the edge's fault and must not look like a clean end.
        raise OutcomeUnknown("the stream ended without a result", cause="detached")

    async def _send_chunk(self, chunk: OutputChunk) -> None:
        if self._discarding:
            await self._attachment.consumed(chunk.stream, len(chunk.data))
        else:
            await self._send(streaming.encode_data(chunk.stream, chunk.offset, chunk.data))

    async def _send(self, message: bytes) -> None:
        # That the client has gone is the reader's to say, after all that was sent before.
        with contextlib.suppress(Gone):
            await send(self._socket, message)

    async def discard(self) -> None:
        """Nobody reads from here on. What was sent and not yet consumed is granted anew."""
        self._discarding = True
        for stream in (1, 2):
            await self._attachment.consumed(stream, self._credit)


class _Commands:
    """What the client sends. Input waits in a queue of its own, so that a program that reads slowly does not hold up credit and signals."""

    def __init__(self, socket: WireSocket, attachment: Attachment) -> None:
        self._socket = socket
        self._attachment = attachment
        self._pending: deque[bytes | None] = deque()
        self._pending_bytes = 0
        self._arrived = asyncio.Event()
        self._ended = False
        self._left = False

    async def read(self, left: Callable[[], Awaitable[None]]) -> None:
        """Until the client leaves; `left` is then called, and feed_stdin() ends with what was sent before."""
        with contextlib.suppress(Gone):
            while True:
                message = await receive(self._socket)
                if message:
                    await self._act(message[0], message)
        self._left = True
        self._arrived.set()
        if self._pending_bytes:
            await left()

    async def _act(self, kind: int, message: bytes) -> None:
        if kind == streaming.CREDIT:
            stream, count = streaming.decode_credit(message)
            await self._attachment.consumed(stream, count)
        elif kind == streaming.STDIN:
            self._queue(message[1:])
        elif kind == streaming.STDIN_EOF:
            self._queue(None)
        elif kind == streaming.SIGNAL:
            request = self._decode_signal(message[1:])
            number = signal_number(request.signal)
            # A command that has just ended is no error of the client's, which will see the result next.
            with contextlib.suppress(Conflict):
                await self._attachment.signal(number, tree=request.tree)
        elif kind == streaming.RESIZE:
            rows, cols = streaming.decode_resize(message)
            with contextlib.suppress(Conflict):
                await self._attachment.resize(rows, cols)
        else:
            raise InvalidArgument(f"message kind {kind} is not known", field="kind")

    def _decode_signal(self, body: bytes) -> SignalRequest:
        try:
            return _signal_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"not a signal request: {error}", field="signal") from None

    def _queue(self, data: bytes | None) -> None:
        if self._ended:
            raise Conflict("stdin was closed before", cause="stdin-closed")
        if data is None:
            self._ended = True
        else:
            self._pending_bytes += len(data)
            if self._pending_bytes > streaming.STDIN_WINDOW:
                raise InvalidArgument("more input than was granted", field="stdin")
        self._pending.append(data)
        self._arrived.set()

    async def feed_stdin(self) -> None:
        """Give the command its input, until the client has left and all that it sent is given."""
        while self._pending or not self._left:
            if not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            data = self._pending.popleft()
            # A program may close its input and go on, as `head` does; what was meant for it is dropped.
            with contextlib.suppress(Conflict):
                if data is None:
                    await self._attachment.close_stdin()
                else:
                    await self._attachment.write_stdin(data)
            if data is not None:
                self._pending_bytes -= len(data)
                with contextlib.suppress(Gone):
                    await send(self._socket, streaming.encode_stdin_credit(len(data)))


ROUTES = [stream_process]
