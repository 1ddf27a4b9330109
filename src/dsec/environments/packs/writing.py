"""Writing a file in a thread of its own, while the next bytes are read and hashed."""

from __future__ import annotations

import os
import queue
import threading
from typing import Final

__all__ = ["Writer"]

_AHEAD: Final = 2
"""Buffers that wait; more are waited for."""


class Writer:
    """Writes buffers to the file `fd`, in the order in which they come. A failure is raised by the next call.

    The thread is a daemon: a store that hangs must not keep the process from ending.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: queue.Queue[tuple[bytes | bytearray, int] | None] = queue.Queue(_AHEAD)
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="dsec-pack", daemon=True)
        self._thread.start()

    def write(self, data: bytes | bytearray, offset: int) -> None:
        """Have `data`, which is the writer's from now on, written at `offset`. OSError for an earlier write that failed."""
        self._check()
        self._waiting.put((data, offset))

    def close(self) -> None:
        """Wait for everything to be written. OSError if something could not be."""
        self._waiting.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._failure is None:
                try:
                    self._write(memoryview(item[0]), item[1])
                except OSError as error:
                    self._failure = error

    def _write(self, view: memoryview, offset: int) -> None:
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count
