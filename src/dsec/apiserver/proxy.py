"""An HTTP request carried to a server inside a sandbox, over a socket that is connected already.

Streams both ways, one request a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import httptools
from litestar.types import Receive, Scope, Send

from libdsec.errors import ConnectionFailed, DSecError

__all__ = ["forward"]

READ_BYTES = 256 << 10
HEADERS_MOST = 256
HEAD_BYTES_MOST = 256 << 10
HEADERS_SECONDS = 3600.0
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"expect"}
)
_OURS = frozenset({b"authorization"})
"""The bearer token is for us: a guest must not see it. For a credential of the guest's own server there is `x-guest-authorization`."""


async def forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: bytes, port: int, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the request of `scope` as `path` and the answer back.

    Raises ConnectionFailed where no answer begins; breaks off where it stops.
    """
    sending = asyncio.ensure_future(_send_request(writer, path, port, scope, receive))
    try:
        answer = _Answer(scope["method"] == "HEAD")  # type: ignore[typeddict-item]
        head = await asyncio.wait_for(answer.head(reader), HEADERS_SECONDS)
        await send({"type": "http.response.start", "status": head[0], "headers": head[1]})
        async for piece in answer.body(reader):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _send_request(writer: asyncio.StreamWriter, path: bytes, port: int, scope: Any, receive: Receive) -> None:
    lines = [b"%s %s HTTP/1.1\r\n" % (scope["method"].encode(), path), b"host: 127.0.0.1:%d\r\n" % port, b"connection: close\r\n"]
    length: bytes | None = None
    has_body = False
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = value
        elif name == b"transfer-encoding":
            has_body = True
        elif name == b"x-guest-authorization":
            lines.append(b"authorization: %s\r\n" % value)
        elif name not in _HOP_BY_HOP and name not in _OURS and name != b"host":
            lines.append(b"%s: %s\r\n" % (name, value))
    chunked = length is None and has_body
    if length is not None:
        lines.append(b"content-length: %s\r\n" % length)
    elif chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    writer.write(b"".join(lines) + b"\r\n")
    # A server may answer and hang up before it has read all of the body; what it said then still counts.
    with contextlib.suppress(ConnectionError):
        while length is not None or chunked:
            message: Any = await receive()
            if message["type"] != "http.request":
                return
            if body := message["body"]:
                writer.writelines([b"%x\r\n" % len(body), body, b"\r\n"] if chunked else [body])
                await writer.drain()
            if not message.get("more_body", False):
                break
        if chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()


class _Answer:
    """The callbacks of httptools' parser, gathered."""

    def __init__(self, bodiless: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._bodiless = bodiless
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_done = False
        self._complete = False
        self._framed = False
        self._status = 0
        self._pieces: deque[bytes] = deque()

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if len(self._headers) >= HEADERS_MOST:
            raise ValueError("too many headers")
        if lower in (b"content-length", b"transfer-encoding"):
            self._framed = True
        if lower not in _HOP_BY_HOP and lower != b"x-dsec-error":
            self._headers.append((lower, value.strip()))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._headers.clear()
            return
        self._status = status
        self._head_done = True
        self._framed = self._framed or status in (204, 304)
        if self._bodiless or status in (204, 304):
            self._complete = True

    def on_body(self, body: bytes) -> None:
        if self._head_done and not self._complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise ConnectionFailed("the server in the sandbox switched protocols", ran="ran", cause="upgrade") from None
        except (httptools.HttpParserError, ValueError) as error:
            raise ConnectionFailed(f"the server in the sandbox does not speak HTTP: {error}", ran="unknown", cause="protocol") from error

    async def head(self, reader: asyncio.StreamReader) -> tuple[int, list[tuple[bytes, bytes]]]:
        taken = 0
        while not self._head_done:
            data = await self._read(reader)
            taken += len(data)
            if not data:
                raise ConnectionFailed("the server in the sandbox closed the connection without an answer", ran="unknown", cause="closed")
            if taken > HEAD_BYTES_MOST:
                raise ConnectionFailed("the answer's head is too long", ran="unknown", cause="protocol")
            self._feed(data)
        return self._status, self._headers

    async def body(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._complete:
                return
            data = await self._read(reader)
            if not data:
                if self._framed:
                    raise DSecError("the answer was cut off", ran="ran", cause="truncated")
                return
            self._feed(data)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(READ_BYTES)
        except ConnectionError as error:
            raise ConnectionFailed(f"the connection into the sandbox broke: {error}", ran="unknown", cause="broken") from error
