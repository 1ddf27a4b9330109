"""Streams kept for a client that has started a process and is about to attach.

Without a reader a process's output is kept up to a cap, and what is between head and tail is dropped: a fast program drops some before
its client's second request arrives. So a start may ask that the server attaches at once. No credit is given, so nothing is buffered here;
the first stream takes it over.
"""

from __future__ import annotations

import asyncio

from dsec.apiserver.contract import EdgeApi
from dsec.backends.protocol import Attachment
from libdsec.errors import DSecError

__all__ = ["HOLD_SECONDS_MOST", "Holds"]

HOLD_SECONDS_MOST = 10.0
_HOLDS_MOST = 4096

_Key = tuple[str, str]


class Holds:
    """Attachments by sandbox and operation, each for a few seconds."""

    def __init__(self) -> None:
        self._waiting: dict[_Key, tuple[Attachment, asyncio.TimerHandle]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def keep(self, edge: EdgeApi, sandbox_id: str, op_id: str, seconds: float) -> None:
        """Attach and wait up to `seconds` for a taker. Does nothing where it cannot: the process has started, and that is what counts."""
        key = (sandbox_id, op_id)
        if key in self._waiting or len(self._waiting) >= _HOLDS_MOST:
            return
        try:
            attachment = await edge.attach(sandbox_id, op_id, credit=0)
        except DSecError:
            return
        timer = asyncio.get_running_loop().call_later(seconds, self.release, sandbox_id, op_id)
        self._waiting[key] = (attachment, timer)

    def take(self, sandbox_id: str, op_id: str) -> Attachment | None:
        """The attachment, at the beginning of both streams and without credit; the taker closes it."""
        found = self._waiting.pop((sandbox_id, op_id), None)
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    def release(self, sandbox_id: str, op_id: str) -> None:
        """Nobody comes for it."""
        attachment = self.take(sandbox_id, op_id)
        if attachment is not None:
            task = asyncio.get_running_loop().create_task(attachment.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Release all."""
        for sandbox_id, op_id in list(self._waiting):
            self.release(sandbox_id, op_id)
        await asyncio.gather(*self._closing, return_exceptions=True)
