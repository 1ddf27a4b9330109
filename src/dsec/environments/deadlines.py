"""Work on a store that may stall: a read of a dead network file system blocks its thread for as long as the kernel likes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["STUCK_MAX", "within", "within_async"]

T = TypeVar("T")
STUCK_MAX: Final = 64
"""Threads that may hang in stores at one time. Beyond it nothing more is asked of them, and who asks is told at once."""

_lock = threading.Lock()
_stuck = 0


class _Call(Generic[T]):
    """One action in a thread of its own. Given up, it counts as stuck until the kernel lets go of it."""

    def __init__(self, what: str, action: Callable[[], T], ended: Callable[[], None] = lambda: None) -> None:
        if _stuck >= STUCK_MAX:
            raise TimeoutError(f"the store does not answer, {_stuck} calls hang in it")
        self._action = action
        self._ended = ended
        self._state = "running"
        self._result: list[T] = []
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name=f"store: {what}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        global _stuck
        try:
            self._result.append(self._action())
        except BaseException as error:
            self._failure = error
        with _lock:
            if self._state == "stuck":
                _stuck -= 1
            self._state = "done"
        self._ended()

    def give_up(self) -> bool:
        """False if it has ended after all."""
        global _stuck
        with _lock:
            if self._state != "running":
                return False
            self._state = "stuck"
            _stuck += 1
        return True

    def result(self) -> T:
        if self._failure is not None:
            raise self._failure
        return self._result[0]


def _patience(seconds: float) -> float:
    """Each call that hangs shortens the patience with the next one: of a store that is away, many are told soon."""
    return max(min(seconds, 1.0), seconds / (1 + _stuck))


def within(seconds: float, what: str, action: Callable[[], T]) -> T:
    """Do `action` in a thread of its own and return its result; TimeoutError if it is not done in time, or too many others are not.

    The thread cannot be ended: it goes on until the kernel lets go of it, and what it does then must be harmless.
    """
    seconds = _patience(seconds)
    call = _Call(what, action)
    call.thread.join(seconds)
    if call.give_up():
        raise TimeoutError(f"the store did not answer within {seconds:g} s")
    return call.result()


async def within_async(seconds: float, what: str, action: Callable[[], T]) -> T:
    """As `within`, holding up no event loop. Cancelled, it stops waiting."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def tell() -> None:
        # the loop may be gone by the time
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    seconds = _patience(seconds)
    call = _Call(what, action, tell)
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        if call.give_up():
            raise TimeoutError(f"the store did not answer within {seconds:g} s") from None
    except asyncio.CancelledError:
        call.give_up()
        raise
    return call.result()
