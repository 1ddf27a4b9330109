"""The connection on which a sandbox's events come, from its birth or after an adoption."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from dsec.backends.container import wire
from dsec.backends.container.conversation import Conversation
from dsec.backends.container.failures import channel_closed, error_from_fields
from dsec.backends.container.frames import Fields, Frame, MalformedFrame
from dsec.backends.container.requests import live_session
from dsec.backends.protocol import ChannelEvent, LiveSession
from libdsec.errors import DSecError

__all__ = ["Watch"]

GIVE_UP_SECONDS: Final = 5.0
_EVENT_NAMES: Final = {wire.EVENT_INIT_DIED: "init-died", wire.EVENT_OOM: "oom", wire.EVENT_SESSION_ENDED: "session-ended"}


class Watch(Conversation):
    """`ready` gives READY's fields or raises why there is none; `sessions` is done only where HELLO was sent.

    After READY, the end of the connection is the end of the sandbox: it gives one `closed` event, unless `close` was called first.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, path: str, on_event: Callable[[ChannelEvent], None]) -> None:
        super().__init__(loop, sock, path)
        self._on_event = on_event
        self._live: list[LiveSession] = []
        self.ready: asyncio.Future[Fields] = loop.create_future()
        self.sessions: asyncio.Future[list[LiveSession]] = loop.create_future()
        self._announced = False

    def _frame(self, frame: Frame) -> None:
        kind = frame[0]
        if kind == wire.EVENT:
            fields = Fields(frame[2])
            name = _EVENT_NAMES.get(fields.number(wire.T_EVENT_KIND))
            if name is not None:
                self._on_event(ChannelEvent(name, fields.text(wire.T_DETAIL), fields.text(wire.T_SESSION_ID) or None))
        elif kind == wire.READY:
            self._announced = True
            if not self.ready.done():
                self.ready.set_result(Fields(frame[2]))
        elif kind == wire.SESSION:
            self._live.append(live_session(Fields(frame[2])))
        elif kind == wire.OK:
            if not self.sessions.done():
                self.sessions.set_result(self._live)
        elif kind == wire.ERROR:
            error = error_from_fields(Fields(frame[2]))
            self.close()
            self._lost(error)
        else:
            raise MalformedFrame(f"kind {kind} has no place on a watch connection")

    async def give_up(self) -> None:
        """Nobody wants what is being born. Returns when aether has undone it, or has come so far that it can be stopped; closed then.

        To be used before READY was seen. An aether that does neither in some seconds is left to whoever removes what there is of it.
        """
        self._on_event = _unheard
        if not self.closed:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            await asyncio.wait([self.ready], timeout=GIVE_UP_SECONDS)
        self.close()

    def _end(self, what: str) -> None:
        self.lose(channel_closed(what, "unknown"))

    def _lost(self, error: DSecError) -> None:
        for future in (self.ready, self.sessions):
            if not future.done():
                future.set_exception(error)
                future.exception()  # Marks it as seen, since nobody may be waiting.
        if self._announced:
            self._on_event(ChannelEvent("closed", error.message))


def _unheard(event: ChannelEvent) -> None:
    """Of a birth that was given up."""
