"""Finishing what must be finished although the caller is being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["finish"]

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T], *, patience: int = 1) -> T:
    """Run `work` to its end even if the calling task is cancelled meanwhile; the cancellation then comes after it.

    `work` must be bounded by itself: nothing here ends it before, short of being cancelled more than `patience` times, which is passed on
    to it.
    """
    task = asyncio.ensure_future(work)
    cancelled: list[asyncio.CancelledError] = []
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                break
            cancelled.append(error)
            if len(cancelled) > patience:
                task.cancel()
        except Exception:
            break
    if cancelled:
        if not task.cancelled():
            # Seen here, so that the loop does not report it as never retrieved.
            task.exception()
        raise cancelled[0]
    return task.result()
