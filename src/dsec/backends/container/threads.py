"""Blocking work beside the event loop, without leaving it behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Final, ParamSpec, TypeVar

__all__ = ["ahead_of_others", "begun_in_thread", "in_pool", "in_thread"]

P = ParamSpec("P")
T = TypeVar("T")

_FIRST: Final = -20


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in the loop's executor. A cancellation is raised only once the function has returned.

    A thread cannot be stopped: left running, it would make what the undoing of a cancelled birth has just looked for in vain.
    """
    return await in_pool(None, functools.partial(function, *args, **kwargs))


async def in_pool(pool: Executor | None, function: Callable[[], T]) -> T:
    """As `in_thread`, in a pool of one's own: for what may take so long that others must not queue behind it."""
    return await _attended(asyncio.get_running_loop().run_in_executor(pool, function))


def begun_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Begun at once, not only when it is awaited: by `asyncio.shield`, for a cancellation would end the future and not the function."""
    return asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args, **kwargs))


async def _attended(work: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


@contextlib.contextmanager
def ahead_of_others() -> Iterator[None]:
    """This thread gets a CPU before others that are ready to run. For moments."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, _FIRST)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
