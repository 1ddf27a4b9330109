"""What all WebSocket routes share: binary messages in and out, and an end that says why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from litestar import WebSocket
from litestar.datastructures import State
from litestar.exceptions import WebSocketDisconnect

from dsec.apiserver.failures import typed_error

__all__ = ["Gone", "WireSocket", "accept", "close_with", "receive", "run_all", "run_until_first", "send"]

WireSocket = WebSocket[Any, Any, State]
_REASON_BYTES = 123  # what a closing frame has room for
_CLOSED = (OSError, RuntimeError, WebSocketDisconnect)
"""The server's protocol raises its own OSError, or RuntimeError after a close that crossed ours; Litestar what it saw before."""


class Gone(Exception):
    """The client closed its end or vanished."""


async def accept(socket: WireSocket) -> None:
    """Take the connection. Refusals come after it, since few clients show a refused handshake's body."""
    message: Any = await socket.receive()
    if message["type"] != "websocket.connect":
        raise Gone
    await socket.send({"type": "websocket.accept", "subprotocol": None, "headers": []})


async def receive(socket: WireSocket) -> bytes:
    """The next message; text counts as its UTF-8 bytes. Gone at the end."""
    message: Any = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise Gone
    data: bytes | None = message.get("bytes")
    return data if data is not None else bytes(message["text"].encode())


async def send(socket: WireSocket, data: bytes) -> None:
    """Send one message; waits while the client does not read."""
    try:
        await socket.send({"type": "websocket.send", "bytes": data, "text": None})
    except _CLOSED as error:
        raise Gone from error


async def close_with(socket: WireSocket, error: Exception | None = None) -> None:
    """Close in good order (1000), or with 4000 + the error's HTTP status and `code: message` for a reason."""
    code, reason = 1000, ""
    if error is not None:
        typed, status = typed_error(error)
        code = 4000 + status
        reason = f"{typed.code}: {typed.message}".encode()[:_REASON_BYTES].decode(errors="ignore")
    with contextlib.suppress(*_CLOSED):
        await socket.send({"type": "websocket.close", "code": code, "reason": reason})


async def run_all(*works: Coroutine[Any, Any, None]) -> None:
    """Run all to their ends. The first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_until_first(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, then cancel the others and wait for them. Raises what the first raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done and not task.cancelled() and (error := task.exception()) is not None:
            raise error
