"""The listeners: uvicorn's HTTP and WebSocket protocols on a Unix socket and, with a token, on TCP.

Not `uvicorn.Server`: that takes the process's signals, closes idle connections after seconds and stops only when polled. Its protocol
classes are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any, cast

import structlog
from litestar.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dsec.apiserver.app import create_app
from dsec.apiserver.auth import RequireToken
from dsec.apiserver.contract import EdgeApi
from dsec.apiserver.gathering import Gathering
from dsec.apiserver.holds import Holds
from dsec.apiserver.sockets import bind_tcp, bind_unix, unlink_own
from libdsec.errors import InvalidArgument

__all__ = ["ApiServer", "serve"]

_log = structlog.get_logger("dsec.apiserver")
KEEP_ALIVE_SECONDS = 3600
"""Longer than any client's: a server that closes an idle connection races the client's next request, whose outcome then is unknown."""
WEBSOCKET_MESSAGE_MAX = 4 << 20


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(Gathering(transport))  # type: ignore[arg-type]

    def eof_received(self) -> None:
        # The transport closes itself next; who has only ended its own side waits for the answer.
        cast("Gathering", self.transport).flush()


class _Listener:
    """One app on one listening socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self.socket = listener
        self._config = Config(
            app=app,
            http="httptools",
            ws="websockets-sansio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ws_max_size=WEBSOCKET_MESSAGE_MAX,
            ws_per_message_deflate=False,
            # A reader that takes its time does not answer pings either; it is slow, not dead. The kernel's keepalive finds the dead.
            ws_ping_interval=None,
            ws_ping_timeout=None,
            proxy_headers=False,
        )
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        if self.socket.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(self._protocol, sock=self.socket)
        else:
            self._server = await loop.create_server(self._protocol, sock=self.socket)

    def _protocol(self) -> asyncio.Protocol:
        return _Protocol(config=self._config, server_state=self._state, app_state={})

    async def aclose(self, grace: float) -> None:
        if self._server is not None:
            self._server.close()
        self.socket.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = list(self._state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=grace + 1.0)
        for connection in list(self._state.connections):
            with contextlib.suppress(Exception):
                connection.transport.abort()


class ApiServer:
    """Serves an edge. `async with ApiServer(...)` or start() and aclose(); signals and the edge's own life are the caller's.

    `tcp` is `host:port` and needs `token`. After start(), `tcp_port` is the bound port.
    """

    def __init__(
        self, edge: EdgeApi, unix_path: Path | str | None, tcp: str | None = None, token: str | None = None, *, grace_seconds: float = 1.0
    ) -> None:
        if tcp is not None and not token:
            raise InvalidArgument("TCP needs a token: anybody who reaches the port could run commands", field="token")
        if unix_path is None and tcp is None:
            raise InvalidArgument("give a Unix socket's path, a TCP address, or both", field="unix_path")
        self._edge = edge
        self._unix_path = Path(unix_path) if unix_path is not None else None
        self._tcp = tcp
        self._token = token
        self._grace = grace_seconds
        self._listeners: list[_Listener] = []
        self._identity = (0, 0)
        self._holds = Holds()
        self.tcp_port: int | None = None

    async def start(self) -> None:
        """Bind and accept. On failure nothing stays bound."""
        # Litestar takes its time to work out all signatures, and the edge's loop has sandboxes to look after.
        app = await asyncio.to_thread(create_app, self._edge, None, self._holds)
        try:
            if self._unix_path is not None:
                listener = bind_unix(self._unix_path)
                found = self._unix_path.lstat()
                self._identity = (found.st_dev, found.st_ino)
                self._listeners.append(_Listener(app, listener))
            if self._tcp is not None and self._token:
                listener = bind_tcp(self._tcp)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self.tcp_port = listener.getsockname()[1]
                self._listeners.append(_Listener(RequireToken(app, self._token), listener))
            for each in self._listeners:
                await each.start()
        except BaseException:
            await self.aclose()
            raise
        _log.info("serving", unix=str(self._unix_path) if self._unix_path else None, tcp=self._tcp, tcp_port=self.tcp_port)

    async def aclose(self) -> None:
        """Stop accepting, give running requests `grace_seconds`, then cancel them. Commands go on; their results stay with the edge."""
        listeners, self._listeners = self._listeners, []
        if self._unix_path is not None and listeners:
            unlink_own(self._unix_path, self._identity)
        await asyncio.gather(*(each.aclose(self._grace) for each in listeners))
        await self._holds.aclose()

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()


async def serve(edge: EdgeApi, unix_path: Path | str | None, tcp: str | None = None, token: str | None = None) -> None:
    """Serve until cancelled. Cancelling closes the listeners in an orderly way."""
    async with ApiServer(edge, unix_path, tcp, token):
        await asyncio.get_running_loop().create_future()
