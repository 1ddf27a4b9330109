"""Work on a store that may stall: a read of a dead network file system blocks its thread for as long as the kernel likes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["STUCK_MAX", "within"]

T = TypeVar("T")
STUCK_MAX: Final = 64
"""Threads that may hang in stores at one time. Beyond it nothing more is asked of them, and who asks is told at once."""

_lock = threading.Lock()
_stuck = 0


def within(seconds: float, what: str, action: Callable[[], T]) -> T:
    """Do `action` in a thread of its own and return its result; TimeoutError if it is not done in time, or too many others are not.

    The thread cannot be ended: it goes on until the kernel lets go of it, and what it does then must be harmless. Each call that hangs
    shortens the patience with the next one: of a store that is away, many are told soon.
    """
    global _stuck
    seconds = max(min(seconds, 1.0), seconds / (1 + _stuck))
    outcome: list[T] = []
    failure: list[BaseException] = []
    state = ["running"]

    def work() -> None:
        global _stuck
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)
        with _lock:
            if state[0] == "stuck":
                _stuck -= 1
            state[0] = "done"

    if _stuck >= STUCK_MAX:
        raise TimeoutError(f"the store does not answer, {_stuck} calls hang in it")
    thread = threading.Thread(target=work, name=f"store: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    with _lock:
        if state[0] == "running":
            state[0] = "stuck"
            _stuck += 1
            raise TimeoutError(f"the store did not answer within {seconds:g} s")
    if failure:
        raise failure[0]
    return outcome[0]
