"""A request that its client has left is cancelled.

ASGI servers tell a disconnect only to who asks for the next message, and a handler that waits for a command does not ask. Most requests
end within a millisecond, so the question is put only when one has lasted: a timer costs a microsecond, a task fifteen.
"""

from __future__ import annotations

import asyncio
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

__all__ = ["CancelAbandoned"]

WATCH_AFTER_SECONDS = 0.05
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


class CancelAbandoned:
    """Wraps an ASGI app: when the client goes away, the handler's task gets CancelledError, and the server sees an ordinary end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        watch = _Watch(scope["method"] in _BODILESS, receive, send)
        try:
            await self._app(scope, watch.receive, watch.send)
        except asyncio.CancelledError:
            if not watch.abandoned:
                raise
            watch.task.uncancel()
        finally:
            watch.close()


class _Watch:
    __slots__ = ("_body_read", "_finished", "_receive", "_send", "_timer", "_watcher", "abandoned", "task")

    def __init__(self, body_read: bool, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "an ASGI app runs in a task"
        self.task: asyncio.Task[Any] = task
        self.abandoned = False
        self._body_read = body_read
        self._finished = False
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._begin)

    async def receive(self) -> Any:
        message = await self._receive()
        if not message.get("more_body", False):
            self._body_read = True
        return message

    async def send(self, message: Any) -> None:
        # The server wakes the watcher when the response is complete too; that is no disconnect.
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._finished = True
        await self._send(message)

    def _begin(self) -> None:
        if self._body_read:
            self._watcher = asyncio.get_running_loop().create_task(self._run())
        else:
            # The handler still reads the body and would lose what the watcher takes; it meets the disconnect itself.
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._begin)

    async def _run(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] != "http.disconnect":
                continue
            if not self._finished:
                self.abandoned = True
                self.task.cancel()
            return

    def close(self) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
