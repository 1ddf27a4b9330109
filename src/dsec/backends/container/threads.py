"""Blocking work beside the event loop, without leaving it behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in the loop's executor. A cancellation is raised only once the function has returned.

    A thread cannot be stopped: left running, it would make what the undoing of a cancelled birth has just looked for in vain.
    """
    work = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise
