"""Small writes of one turn of the loop go out as one.

The server writes an answer's head and its body apart, and each write wakes the client: on a busy processor it runs in between, finds half
an answer and sleeps again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

__all__ = ["Gathering"]

PASSED_BYTES: Final = 16 << 10
"""What is as large as this goes out at once: to copy it would cost more than it saves."""


class Gathering:
    """A transport that passes everything on, small writes at the end of the loop's turn."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        """As of asyncio.WriteTransport."""
        if len(data) >= PASSED_BYTES:
            self._flush()
            self._transport.write(data)
            return
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def writelines(self, pieces: Any) -> None:
        """As of asyncio.WriteTransport."""
        for piece in pieces:
            self.write(piece)

    def _flush(self) -> None:
        held = self._held
        if held:
            self._held = []
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        """What was written goes out first."""
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        """As of asyncio.WriteTransport."""
        self._flush()
        self._transport.write_eof()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
