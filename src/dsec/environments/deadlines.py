"""Work on a store that may stall: a read of a dead network file system blocks its thread for as long as the kernel likes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


def within(seconds: float, what: str, action: Callable[[], T]) -> T:
    """Do `action` in a thread of its own and return its result; TimeoutError if it is not done in time.

    The thread cannot be ended: it goes on until the kernel lets go of it, and what it does then must be harmless.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name=f"store: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"the store did not answer within {seconds:g} s")
    if failure:
        raise failure[0]
    return outcome[0]
