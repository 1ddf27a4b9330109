"""Ways from here to a port inside a sandbox."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlencode

import msgspec

from libdsec.api import Api, decode_error
from libdsec.errors import Conflict, ConnectionFailed
from libdsec.shielding import finish
from libdsec.transport import WebSocket

__all__ = ["HttpReply", "PortHttp", "TcpConnection"]

PIECE_BYTES = 256 << 10


class TcpConnection:
    """A byte stream to a port inside a sandbox, by `async with sandbox.tcp(port) as connection`."""

    def __init__(self, api: Api, path: str) -> None:
        self._api = api
        self._path = path
        self._stack = AsyncExitStack()
        self._socket: WebSocket | None = None
        self._rest = b""
        self._ended = False
        self._closed_for_writing = False

    async def __aenter__(self) -> TcpConnection:
        self._socket = await self._stack.enter_async_context(self._api.transport.websocket(self._path))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await finish(self.aclose())

    async def aclose(self) -> None:
        """Close both directions."""
        self._socket = None
        await self._stack.aclose()

    def _open(self) -> WebSocket:
        if self._socket is None:
            raise Conflict("the connection is not open", cause="detached")
        return self._socket

    async def read(self, most: int = -1) -> bytes:
        """Some bytes, at most `most` where it is given; none at the end. Raises NotFound where nothing listens on the port."""
        if not self._rest and not self._ended:
            self._rest = await self._open().receive() or b""
            self._ended = not self._rest
        if most < 0 or most >= len(self._rest):
            data, self._rest = self._rest, b""
        else:
            data, self._rest = self._rest[:most], self._rest[most:]
        return data

    async def read_exactly(self, count: int) -> bytes:
        """`count` bytes. ConnectionFailed where the stream ends before."""
        pieces: list[bytes] = []
        left = count
        while left > 0:
            piece = await self.read(left)
            if not piece:
                raise ConnectionFailed(f"the stream ended {left} bytes early", ran="ran", cause="truncated")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    async def write(self, data: bytes) -> None:
        """Send bytes; waits while the other side does not take them."""
        if self._closed_for_writing:
            raise Conflict("end of stream was sent before", cause="eof-sent")
        for start in range(0, len(data), PIECE_BYTES):
            await self._open().send(data[start : start + PIECE_BYTES])

    async def write_eof(self) -> None:
        """No more comes from here; reading goes on."""
        if not self._closed_for_writing:
            self._closed_for_writing = True
            await self._open().send(b"")


class HttpReply:
    """The answer of a server inside a sandbox."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"<HttpReply {self.status}, {len(self.body)} bytes>"

    @property
    def text(self) -> str:
        """The body as UTF-8, with what is none replaced."""
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """The body's JSON."""
        return msgspec.json.decode(self.body)


class PortHttp:
    """HTTP to a port inside a sandbox: `await sandbox.http(8000).get("/path")`."""

    def __init__(self, api: Api, path: str) -> None:
        self._api = api
        self._path = path

    async def request(
        self,
        method: str,
        path: str = "/",
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | AsyncIterable[bytes] | None = None,
        json: Any = None,
    ) -> HttpReply:
        """One request. Never repeated: what it does there is not ours to know.

        `path` is percent-encoded by the caller where it needs to be. An Authorization header reaches the sandbox's server, our own token
        does not.
        """
        outgoing = {
            ("X-Guest-Authorization" if name.lower() == "authorization" else name): value for name, value in (headers or {}).items()
        }
        if json is not None:
            body = msgspec.json.encode(json)
            outgoing.setdefault("Content-Type", "application/json")
        target = f"{self._path}/{path.lstrip('/')}"
        if params:
            target += ("&" if "?" in path else "?") + urlencode(dict(params), doseq=True)
        async with self._api.transport.stream(method.upper(), target, body=body, headers=outgoing) as reply:
            content = await reply.read()
            if reply.headers.get("X-DSec-Error") is not None:
                raise decode_error(reply.status, content, reply.headers.get("Content-Type", ""))
            return HttpReply(reply.status, reply.headers, content)

    async def get(self, path: str = "/", *, params: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> HttpReply:
        """GET."""
        return await self.request("GET", path, params=params, headers=headers)

    async def post(
        self,
        path: str = "/",
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | AsyncIterable[bytes] | None = None,
        json: Any = None,
    ) -> HttpReply:
        """POST."""
        return await self.request("POST", path, params=params, headers=headers, body=body, json=json)

    async def stream(
        self, method: str, path: str = "/", *, headers: Mapping[str, str] | None = None, body: bytes | AsyncIterable[bytes] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The answer's body piece by piece, whatever its status, for event streams and large bodies."""
        target = f"{self._path}/{path.lstrip('/')}"
        async with self._api.transport.stream(method.upper(), target, body=body, headers=_outgoing(headers)) as reply:
            if reply.headers.get("X-DSec-Error") is not None:
                raise decode_error(reply.status, await reply.read(), reply.headers.get("Content-Type", ""))
            async for piece in reply.chunks():
                yield piece


def _outgoing(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {("X-Guest-Authorization" if name.lower() == "authorization" else name): value for name, value in (headers or {}).items()}
