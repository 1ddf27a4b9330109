"""How bytes reach a server: HTTP over a Unix socket or TCP. `libdsec.asgi` is the same seam in one process.

A transport knows nothing of the API: it sends a request and gives the answer, and tells apart what was not sent from what may have been.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, cast
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from libdsec.calls import IDLE_CONNECTION_SECONDS, Calls, CannotConnect, Reply
from libdsec.errors import Conflict, ConnectionFailed, Denied, InvalidArgument, error_from_wire
from libdsec.timeouts import Timeouts

__all__ = ["HttpTransport", "Reply", "StreamReply", "Transport", "WebSocket", "open_transport"]

READ_BUFFER_BYTES = 1 << 20
PIECE_BYTES = 256 << 10
_TIMED_OUT = "timeout"
_NOT_SENT = (CannotConnect, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, FileNotFoundError, ConnectionRefusedError)


class StreamReply(Protocol):
    """An answer whose body is read piece by piece."""

    status: int

    @property
    def headers(self) -> Mapping[str, str]: ...
    def chunks(self) -> AsyncIterator[bytes]: ...
    async def read(self) -> bytes: ...


class WebSocket(Protocol):
    """A connected WebSocket that carries binary messages."""

    async def send(self, data: bytes) -> None:
        """Send one message; waits while the peer does not read. ConnectionFailed when it is closed."""
        ...

    async def receive(self) -> bytes | None:
        """The next message; None when the peer closed in good order. ConnectionFailed when the connection broke."""
        ...

    async def aclose(self) -> None: ...


class Transport(Protocol):
    """The seam. Errors are ConnectionFailed: `ran` is "not-run" where no byte can have been acted on, else "unknown"."""

    async def call(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Reply: ...
    def stream(
        self,
        method: str,
        target: str,
        *,
        body: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[StreamReply]: ...
    def websocket(self, target: str) -> AbstractAsyncContextManager[WebSocket]: ...
    async def aclose(self) -> None: ...


def open_transport(url: str, token: str | None, timeouts: Timeouts) -> Transport:
    """A transport for `unix:///path/to.sock`, `http://host:port` or `https://host:port`."""
    if token is not None and not (token.isascii() and token.isprintable()):
        raise InvalidArgument("the token has characters that no header can carry", field="token")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InvalidArgument(f"{url!r}: {error}", field="url") from error
    if parts.scheme == "unix":
        path = parts.netloc + parts.path
        if not path:
            raise InvalidArgument("unix:// needs a path, e.g. unix:///run/dsec/dsec.sock", field="url")
        return HttpTransport(URL("http://dsec"), path, token, timeouts)
    if parts.scheme in ("http", "https") and parts.netloc:
        return HttpTransport(URL(f"{parts.scheme}://{parts.netloc}"), None, token, timeouts)
    raise InvalidArgument(f"{url!r} is not unix:///path, http://host:port or https://host:port", field="url")


class _Socket(aiohttp.ClientWebSocketResponse):
    def let_go(self) -> None:
        """Close the connection, whatever became of the closing handshake. aiohttp leaves it open where that was not begun or not ended."""
        self._response.close()


class HttpTransport:
    """`Calls` for what fits in memory and stays on this machine, an aiohttp session for all else. Made lazily, in the loop that first uses
    it."""

    def __init__(self, base: URL, unix_path: str | None, token: str | None, timeouts: Timeouts) -> None:
        self._base = str(base).rstrip("/")
        own = {"Host": base.host or ""} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._calls = Calls(unix_path, own) if unix_path is not None else None
        self._unix_path = unix_path
        self._token = token
        self._timeouts = timeouts
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._timeout_objects: dict[float | None, aiohttp.ClientTimeout] = {}

    def _open(self) -> aiohttp.ClientSession:
        session = self._session
        if self._closed:
            raise Conflict("the client is closed", cause="closed")
        if session is None:
            connector: aiohttp.BaseConnector
            if self._unix_path is not None:
                connector = aiohttp.UnixConnector(self._unix_path, limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS)
            else:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS)
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            session = self._session = aiohttp.ClientSession(
                connector=connector,
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=READ_BUFFER_BYTES,
                skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
                ws_response_class=_Socket,
            )
        return session

    def _timeout(self, total: float | None) -> aiohttp.ClientTimeout:
        made = self._timeout_objects.get(total)
        if made is None:
            if len(self._timeout_objects) > 256:
                self._timeout_objects.clear()
            made = self._timeout_objects[total] = aiohttp.ClientTimeout(total=total, connect=None, sock_connect=self._timeouts.connect)
        return made

    async def call(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        if self._closed:
            raise Conflict("the client is closed", cause="closed")
        if self._calls is None or method == "HEAD" or (body is not None and len(body) > PIECE_BYTES):
            return await self._call(method, target, body, headers, timeout)
        try:
            return await self._calls.call(method, target, body, headers, timeout)
        except (CannotConnect, TimeoutError, OSError) as error:
            raise self._failed(error) from error

    async def _call(self, method: str, target: str, body: bytes | None, headers: Mapping[str, str] | None, timeout: float | None) -> Reply:
        data, headers = _outgoing(body, headers)
        try:
            async with self._open().request(
                method,
                URL(self._base + target, encoded=True),
                data=data,
                headers=headers,
                timeout=self._timeout(timeout),
                allow_redirects=False,
            ) as response:
                return Reply(response.status, await response.read(), response.headers.get("Content-Type", ""))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failed(error) from error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        *,
        body: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[StreamReply]:
        data, headers = _outgoing(body, headers)
        try:
            response = await self._open().request(
                method,
                URL(self._base + target, encoded=True),
                data=data,
                headers=headers,
                timeout=self._timeout(None),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failed(error) from error
        try:
            yield _HttpStream(response, self)
        finally:
            # Of a body read to its end the connection is back in the pool already; of any other it must not be reused.
            response.close()

    @asynccontextmanager
    async def websocket(self, target: str) -> AsyncIterator[WebSocket]:
        try:
            socket = await self._open().ws_connect(
                URL(self._base + target, encoded=True),
                compress=0,
                max_msg_size=0,
                autoping=True,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise Denied("a valid token is needed", field="authorization", cause="token") from error
            raise ConnectionFailed(f"the server refused the stream: HTTP {error.status}", cause=f"http-{error.status}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failed(error) from error
        assert isinstance(socket, _Socket), "the session makes no others"
        wrapped = _HttpWebSocket(socket)
        try:
            yield wrapped
        finally:
            await wrapped.aclose()

    def _failed(self, error: BaseException) -> ConnectionFailed:
        where = self._unix_path or self._base
        if isinstance(error, _NOT_SENT):
            return ConnectionFailed(f"no server at {where}: {error}", ran="not-run", cause="connect")
        if isinstance(error, TimeoutError):
            return ConnectionFailed(f"no answer from {where} in time", ran="unknown", cause=_TIMED_OUT)
        return ConnectionFailed(f"the connection to {where} broke: {error!r}", ran="unknown", cause="broken")

    async def aclose(self) -> None:
        self._closed = True
        if self._calls is not None:
            self._calls.close()
        if self._session is not None:
            await self._session.close()
            self._session = None


def _outgoing(
    body: bytes | AsyncIterable[bytes] | None, headers: Mapping[str, str] | None
) -> tuple[bytes | AsyncIterable[bytes] | None, Mapping[str, str] | None]:
    """Large bodies go in pieces, so that the loop turns between them."""
    if not isinstance(body, bytes) or len(body) <= PIECE_BYTES:
        return body, headers
    return _pieces(body), {**(headers or {}), "Content-Length": str(len(body))}


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    whole = memoryview(body)
    for start in range(0, len(body), PIECE_BYTES):
        # Not sliced as bytes: aiohttp's writer takes any buffer, and a copy saved here is a copy saved of all.
        yield cast("bytes", whole[start : start + PIECE_BYTES])


class _HttpStream:
    def __init__(self, response: aiohttp.ClientResponse, transport: HttpTransport) -> None:
        self._response = response
        self._transport = transport
        self.status = response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._transport._failed(error) from error

    async def read(self) -> bytes:
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._transport._failed(error) from error


class _HttpWebSocket:
    def __init__(self, socket: _Socket) -> None:
        self._socket = socket

    async def send(self, data: bytes) -> None:
        try:
            await self._socket.send_bytes(data)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionFailed(f"the stream is closed: {error}", ran="unknown", cause="broken") from error

    async def receive(self) -> bytes | None:
        try:
            message = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            # Its answer to a ping of the server's found the connection gone.
            raise ConnectionFailed(f"the stream broke: {error!r}", ran="unknown", cause="broken") from error
        if message.type is aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
            code = self._socket.close_code
            if code in (1000, 1005, None):
                return None
            if code >= 4400:
                # The server's refusal: 4000 + the HTTP status, and `code: message` for a reason.
                name, _, text = str(message.extra or "").partition(": ")
                raise error_from_wire({"error": {"code": name, "message": text}}, code - 4000)
            # Among the others 1006: the connection ended without a closing frame.
            raise ConnectionFailed(f"the stream broke with code {code}", ran="unknown", cause="broken")
        raise ConnectionFailed(f"the stream broke: {message.type.name} {message.data!r:.100}", ran="unknown", cause="broken")

    async def aclose(self) -> None:
        try:
            await self._socket.close()
        except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError):
            return
        finally:
            self._socket.let_go()
