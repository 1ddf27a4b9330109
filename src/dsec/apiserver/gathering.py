"""Small writes of one turn of the loop go out as one.

The server writes an answer's head and its body apart, and each write wakes the client: on a busy processor it runs in between, finds half
an answer and sleeps again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

__all__ = ["Gathering"]

PASSED_BYTES: Final = 16 << 10
"""What is as large as this goes out at once: to copy it would cost more than it saves."""


class Gathering:
    """A transport that passes everything on, small writes at the end of the loop's turn."""

    __slots__ = ("_held", "_held_bytes", "_loop", "_transport")

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write(self, data: bytes) -> None:
        """As of asyncio.WriteTransport."""
        if len(data) >= PASSED_BYTES:
            self.flush()
            self._transport.write(data)
            return
        if not self._held:
            self._loop.call_soon(self._turn_ends)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= PASSED_BYTES:
            # Whoever writes without ever waiting would not be told otherwise that its client does not read.
            self.flush()

    def writelines(self, pieces: Any) -> None:
        """As of asyncio.WriteTransport."""
        for piece in pieces:
            self.write(piece)

    def flush(self) -> None:
        """Pass on what is held."""
        held = self._held
        if held:
            self._held, self._held_bytes = [], 0
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def _turn_ends(self) -> None:
        # uvloop's transport raises this where the client has gone meanwhile; the protocol is told of that by itself.
        with contextlib.suppress(RuntimeError):
            self.flush()

    def close(self) -> None:
        """What was written goes out first."""
        self.flush()
        self._transport.close()

    def write_eof(self) -> None:
        """As of asyncio.WriteTransport."""
        self.flush()
        self._transport.write_eof()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
