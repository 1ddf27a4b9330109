"""The transport to an ASGI application in this process: no socket, the same API. For tests, and for a server that uses itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

from libdsec.errors import ConnectionFailed, error_from_wire
from libdsec.transport import Reply, StreamReply, WebSocket

__all__ = ["AsgiTransport"]

App = Callable[[Any, Any, Any], Awaitable[None]]
WAITING_MESSAGES = 8


class AsgiTransport:
    """Calls `app` as an ASGI server would, one task a request. Leaving a request is a disconnect."""

    def __init__(self, app: App, token: str | None = None) -> None:
        self._app = app
        self._token = token

    async def aclose(self) -> None:
        """Nothing is kept between requests."""

    def _scope(self, kind: str, target: str, headers: Mapping[str, str] | None) -> dict[str, Any]:
        path, _, query = target.partition("?")
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        if self._token:
            raw.append((b"authorization", f"Bearer {self._token}".encode()))
        return {
            "type": kind,
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "http" if kind == "http" else "ws",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": raw,
            "client": None,
            "server": None,
            "subprotocols": [],
            "state": {},
            "extensions": {},
        }

    async def call(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        try:
            async with asyncio.timeout(timeout), self.stream(method, target, body=body, headers=headers) as reply:
                return Reply(reply.status, await reply.read(), reply.headers.get("Content-Type", ""))
        except TimeoutError as error:
            raise ConnectionFailed("no answer in time", ran="unknown", cause="timeout") from error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        *,
        body: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[StreamReply]:
        scope = self._scope("http", target, headers)
        scope["method"] = method
        exchange = _Exchange(body)
        task = asyncio.get_running_loop().create_task(exchange.run(self._app, scope))
        try:
            yield await exchange.begun()
        finally:
            exchange.leave()
            await asyncio.gather(task, return_exceptions=True)

    @asynccontextmanager
    async def websocket(self, target: str) -> AsyncIterator[WebSocket]:
        channel = _Channel()
        task = asyncio.get_running_loop().create_task(channel.run(self._app, self._scope("websocket", target, None)))
        try:
            await channel.accepted()
            yield channel
        finally:
            await channel.aclose()
            await asyncio.gather(task, return_exceptions=True)


class _Headers(dict[str, str]):
    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key.lower(), default)

    def __getitem__(self, key: str) -> str:
        return super().__getitem__(key.lower())


class _Exchange:
    """One request: what the application receives, and what it sends as a StreamReply."""

    def __init__(self, body: bytes | AsyncIterable[bytes] | None) -> None:
        self._body = None if body is None or isinstance(body, bytes) else aiter(body)
        self._whole = body if isinstance(body, bytes) else b""
        self._body_sent = False
        self._gone = asyncio.Event()
        self._messages: asyncio.Queue[Any] = asyncio.Queue(WAITING_MESSAGES)
        self.status = 0
        self.headers: Mapping[str, str] = {}

    async def run(self, app: App, scope: Any) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            if not self._gone.is_set():
                await self._messages.put(None)

    async def _receive(self) -> Any:
        if not self._body_sent and not self._gone.is_set():
            if self._body is not None:
                piece = await anext(self._body, None)
                self._body_sent = piece is None
                return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}
            self._body_sent = True
            return {"type": "http.request", "body": self._whole, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self._gone.is_set():
            await self._messages.put(message)

    def leave(self) -> None:
        self._gone.set()
        while not self._messages.empty():
            self._messages.get_nowait()

    async def begun(self) -> _Exchange:
        message = await self._messages.get()
        if message is None:
            raise ConnectionFailed("the application ended without an answer", ran="unknown", cause="broken")
        self.status = message["status"]
        self.headers = _Headers({name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]})
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._messages.get()
            if message is None:
                raise ConnectionFailed("the answer was cut off", ran="unknown", cause="broken")
            if message["body"]:
                yield message["body"]
            if not message.get("more_body", False):
                return

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])


class _Channel:
    """One WebSocket, from both sides."""

    def __init__(self) -> None:
        self._inbound: asyncio.Queue[Any] = asyncio.Queue(WAITING_MESSAGES)
        self._outbound: asyncio.Queue[Any] = asyncio.Queue(WAITING_MESSAGES)
        self._closed = asyncio.Event()
        self._inbound.put_nowait({"type": "websocket.connect"})

    async def run(self, app: App, scope: Any) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            if not self._closed.is_set():
                await self._outbound.put({"type": "websocket.close", "code": 1006, "reason": ""})

    async def _receive(self) -> Any:
        get = asyncio.ensure_future(self._inbound.get())
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait([get, closed], return_when=asyncio.FIRST_COMPLETED)
            return get.result() if get.done() else {"type": "websocket.disconnect", "code": 1000}
        finally:
            get.cancel()
            closed.cancel()

    async def _send(self, message: Any) -> None:
        if self._closed.is_set():
            raise OSError("the client closed the stream")
        await self._outbound.put(message)

    async def accepted(self) -> None:
        message = await self._outbound.get()
        if message["type"] != "websocket.accept":
            raise ConnectionFailed(f"the server refused the stream: {message.get('code')}", cause="refused")

    async def send(self, data: bytes) -> None:
        if self._closed.is_set():
            raise ConnectionFailed("the stream is closed", ran="unknown", cause="broken")
        await self._inbound.put({"type": "websocket.receive", "bytes": data, "text": None})

    async def receive(self) -> bytes | None:
        message = await self._outbound.get()
        if message["type"] == "websocket.send":
            data: bytes = message["bytes"]
            return data
        self._closed.set()
        code = message.get("code", 1000)
        if code in (1000, 1005):
            return None
        if code >= 4400:
            name, _, text = str(message.get("reason") or "").partition(": ")
            raise error_from_wire({"error": {"code": name, "message": text}}, code - 4000)
        raise ConnectionFailed(f"the stream broke with code {code}", ran="unknown", cause="broken")

    async def aclose(self) -> None:
        self._closed.set()
        while not self._outbound.empty():
            self._outbound.get_nowait()
