"""One request and its whole answer over a kept connection to a Unix socket: HTTP/1.1 (RFC 9112), parsed by httptools.

A command's round trip is about a millisecond, and what a general client does beside (its own writer task, timers, header and URL objects)
would be a fifth of it. So this knows one peer, the server of this machine, which frames each answer. Other machines, where a round trip
is the network's, and streams and WebSockets go by aiohttp.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import httptools

from libdsec.errors import InvalidArgument

__all__ = ["IDLE_CONNECTION_SECONDS", "Calls", "CannotConnect", "Reply"]

IDLE_CONNECTION_SECONDS: Final = 30.0
_ENDS_A_LINE: Final = ("\r", "\n", "\0")


@dataclass(slots=True)
class Reply:
    """A complete answer."""

    status: int
    body: bytes
    content_type: str


class CannotConnect(Exception):
    """No connection, so nothing was sent. The cause is the OSError."""


class _Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Reply] | None = None
        self._unasked = False
        """The answer that is being read is to nothing that was asked."""
        self._parts: list[bytes] = []
        self._content_type = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def eof_received(self) -> None:
        # `connection_lost` comes a turn later, and who asks in between would not know whether anything ran.
        self.reusable = False

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._fail(error or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._answered():
            # Bytes that nobody asked for: what they belong to cannot be known.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionResetError(f"no answer of HTTP: {error!r}"))
            self.close()

    def _answered(self) -> bool:
        return self._answer is None or self._answer.done()

    # -- what the parser found

    def on_message_begin(self) -> None:
        # Also where only its first bytes have come along with an answer: then nothing may follow on this connection.
        self.reusable = False
        self._unasked = self._answered()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        parts, content_type = self._parts, self._content_type
        self._parts, self._content_type = [], ""
        if status < 200 or self._unasked:
            return
        self.reusable = self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Reply(status, parts[0] if len(parts) == 1 else b"".join(parts), content_type))

    # -- requests

    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self.reusable and self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, timeout: float | None) -> Reply:
        """The answer. OSError where the connection breaks, TimeoutError; after any error or a cancellation the connection is closed."""
        loop = asyncio.get_running_loop()
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        answer: asyncio.Future[Reply] = loop.create_future()
        self._answer = answer
        self.reusable = False
        timer = loop.call_later(timeout, self._fail, TimeoutError()) if timeout is not None else None
        try:
            transport.write(request)
            return await answer
        finally:
            self._answer = None
            if answer.done() and not answer.cancelled():
                answer.exception()  # of one who is cancelled as the connection breaks nobody hears it
            if timer is not None:
                timer.cancel()
            if not self.reusable:
                self.close()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            # Not `close`: that would wait for what is still unsent, and nobody reads the answer.
            self._transport.abort()


class Calls:
    """Requests to the server at one Unix socket, in one event loop.

    As many connections as there are requests at once; those without work are kept for a while.
    """

    def __init__(self, path: str, headers: Mapping[str, str]) -> None:
        self._path = path
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._fixed = "".join(f"{name}: {_checked(name, value)}\r\n" for name, value in headers.items())

    async def call(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Reply:
        """Send and wait; any method but HEAD. CannotConnect where nothing was sent; OSError or TimeoutError where that is not known."""
        request = self._request(method, target, body, headers)
        connection = self._take() or await self._connect()
        self._busy.add(connection)
        try:
            return await connection.ask(request, timeout)
        finally:
            self._busy.discard(connection)
            if connection.reusable:
                self._keep(connection)

    def _request(self, method: str, target: str, body: bytes | None, headers: Mapping[str, str] | None) -> bytes:
        if any(mark in target for mark in _ENDS_A_LINE) or " " in target:
            raise InvalidArgument(f"{target!r} is no path of a URL", field="url")
        own = "".join(f"{name}: {_checked(name, value)}\r\n" for name, value in (headers or {}).items())
        length = f"Content-Length: {len(body)}\r\n" if body is not None else "Content-Length: 0\r\n" if method != "GET" else ""
        return f"{method} {target} HTTP/1.1\r\n{self._fixed}{own}{length}\r\n".encode() + (body or b"")

    def _take(self) -> _Connection | None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError("a client belongs to the event loop that used it first")
            self._loop = loop
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        # Connected here: a Unix socket is at once or not, and asyncio takes a full backlog for a connection.
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._path)
            _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, sock=sock)
        except OSError as error:
            sock.close()
            raise CannotConnect(str(error)) from error
        except BaseException:
            sock.close()
            raise
        if self._closed:
            connection.close()
            raise CannotConnect("the client was closed")
        return connection

    def _keep(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_CONNECTION_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        kept: list[_Connection] = []
        for connection in self._idle:
            if connection.usable() and connection.idle_since + IDLE_CONNECTION_SECONDS > loop.time():
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        self._sweep = loop.call_later(IDLE_CONNECTION_SECONDS, self._close_idle) if kept else None

    def close(self) -> None:
        """Close all connections; what they wait for ends with OSError."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()


def _checked(name: str, value: str) -> str:
    """A header's value that stays one line."""
    if any(mark in value for mark in _ENDS_A_LINE):
        raise InvalidArgument(f"the header {name} cannot carry {value!r}", field=name)
    return value
