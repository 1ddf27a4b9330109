"""Several slow calls at once, in threads that nobody waits for at the end of the process: a dead store may hold them for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = ["at_once"]


def at_once(actions: Sequence[Callable[[], object]], threads: int) -> None:
    """Do all `actions`, at most `threads` at a time, and raise the first failure, if there is one, when all have ended."""
    if len(actions) == 1:
        actions[0]()
        return
    waiting: Iterator[Callable[[], object]] = iter(actions)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while True:
            with lock:
                action = next(waiting, None)
            if action is None:
                return
            try:
                action()
            except BaseException as error:
                failures.append(error)

    started = [threading.Thread(target=work, name="store", daemon=True) for _ in range(min(threads, len(actions)))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if failures:
        raise failures[0]
