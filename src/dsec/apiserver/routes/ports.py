"""Ways to a port inside a sandbox: a raw tunnel and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as sockets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from litestar import route, websocket
from litestar.connection import ASGIConnection
from litestar.enums import HttpMethod
from litestar.params import FromPath
from litestar.types import Receive, Scope, Send

from dsec.apiserver.channels import Gone, WireSocket, accept, close_with, receive, run_all, send
from dsec.apiserver.document import Proxied
from dsec.apiserver.proxy import READ_BYTES, forward
from dsec.apiserver.state import edge_of
from dsec.apiserver.wire import WireRequest
from libdsec.errors import InvalidArgument

__all__ = ["ROUTES"]

_AT = "/v1/sandboxes/{sandbox_id:str}/ports/{port:str}"
_METHODS = [HttpMethod.GET, HttpMethod.HEAD, HttpMethod.POST, HttpMethod.PUT, HttpMethod.PATCH, HttpMethod.DELETE]


@asynccontextmanager
async def _connected(
    connection: ASGIConnection[Any, Any, Any, Any], sandbox_id: str, port: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        raise InvalidArgument(f"port {port!r:.20} is not a number from 1 to 65535", field="port")
    edge = edge_of(connection)
    fd = await edge.connect(sandbox_id, int(port))
    try:
        opened = sockets.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise
    try:
        opened.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=opened, limit=READ_BYTES)
    except BaseException:
        opened.close()
        raise
    try:
        with edge.hold(sandbox_id):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@websocket(_AT)
async def tunnel(socket: WireSocket, sandbox_id: FromPath[str], port: FromPath[str]) -> None:
    """Bytes both ways in binary messages. An empty message is an end of stream: the other direction goes on."""
    try:
        await accept(socket)
        try:
            async with _connected(socket, sandbox_id, port) as (reader, writer):
                await run_all(_outwards(socket, reader), _inwards(socket, writer))
        except Gone:
            return
        except Exception as error:
            await close_with(socket, error)
            return
        await close_with(socket)
    except Gone:
        return


async def _outwards(socket: WireSocket, reader: asyncio.StreamReader) -> None:
    # A reset is an end too: the bytes before it have been passed on.
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            await send(socket, data)
    await send(socket, b"")


async def _inwards(socket: WireSocket, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await receive(socket):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class _Proxied:
    """An ASGI answer that carries the request on."""

    def __init__(self, request: WireRequest, sandbox_id: str, port: str, path: bytes) -> None:
        self._request = request
        self._sandbox_id = sandbox_id
        self._port = port
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _connected(self._request, self._sandbox_id, self._port) as (reader, writer):
            await forward(reader, writer, self._path, int(self._port), scope, receive, send)


@route([_AT + "/http", _AT + "/http/{path:path}"], http_method=_METHODS, tags=["ports"], operation_class=Proxied)
async def http(request: WireRequest, sandbox_id: FromPath[str], port: FromPath[str], path: FromPath[str | None] = None) -> _Proxied:
    """The request as the sandbox's server gets it, below `/`; the answer as that server gave it. `Authorization` is not passed on."""
    raw: bytes = request.scope["raw_path"].split(b"?", 1)[0]
    # What follows the fifth segment after /v1/sandboxes/ID/ports/PORT/http, still percent-encoded as it came.
    inner = b"/" + (raw.split(b"/", 7)[7] if raw.count(b"/") >= 7 else b"")
    query: bytes = request.scope["query_string"]
    return _Proxied(request, sandbox_id, port, inner + (b"?" + query if query else b""))


ROUTES = [tunnel, http]
