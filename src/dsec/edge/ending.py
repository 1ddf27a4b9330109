"""The end of a process whose threads may hang in a store: what ends in time is waited for, the rest is named and left to the kernel.

Python itself waits for every thread of a pool, and a thread that reads a dead file system ends when that answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Final

import structlog

__all__ = ["Ending"]

log = structlog.get_logger("dsec.edge")
SETTLE_SECONDS: Final = 3.0
"""For what is under way when all else is let go of."""
POLL_SECONDS: Final = 0.01
ENDS_ANYWHERE: Final = ("store: garbage", "dsec-replay")
"""Threads that may be cut short: the next run of theirs begins where this one ended."""
WORKER: Final = concurrent.futures.thread._worker.__code__
OURS: Final = Path(__file__).parent.parent


class Ending:
    """Of one process with one event loop: all of it is in `process`, all of the loop's work in `after`."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def after(self, work: Coroutine[Any, Any, None]) -> None:
        """All that the loop does; then its threads get some seconds to end."""
        # Made here, so that it is known which threads the loop's blocking calls run in.
        self._take(ThreadPoolExecutor(thread_name_prefix="dsec-loop"))
        try:
            await work
        finally:
            await self._settle()

    def renew(self) -> None:
        """Calls that are made from now on do not queue behind such as hang. Those that are queued are still done."""
        self._take(ThreadPoolExecutor(thread_name_prefix="dsec-end"))

    def _take(self, pool: ThreadPoolExecutor) -> None:
        before, self._pool = self._pool, pool
        asyncio.get_running_loop().set_default_executor(pool)
        if before is not None:
            before.shutdown(wait=False)

    async def _settle(self) -> None:
        # What closes the loop waits for its pool: one in which nothing ever ran.
        self.renew()
        deadline = time.monotonic() + SETTLE_SECONDS
        # The loop goes on meanwhile: some of them wait for it.
        while _worth_waiting():
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def process(self) -> Iterator[None]:
        """The block is all that the process does. Where threads are left after it, the process ends there and then, as the block did."""
        try:
            yield
        except SystemExit as error:
            _leave(error.code if isinstance(error.code, int) else int(error.code is not None))
            raise
        except KeyboardInterrupt:
            _leave(130)
            raise
        except BaseException:
            if _living():
                traceback.print_exc()
            _leave(1)
            raise
        _leave(0)


def _living() -> list[threading.Thread]:
    mine = (threading.main_thread(), threading.current_thread())
    frames = sys._current_frames()
    return [thread for thread in threading.enumerate() if thread not in mine and not _idle(frames.get(thread.ident or 0))]


def _worth_waiting() -> bool:
    return any(not thread.name.startswith(ENDS_ANYWHERE) for thread in _living())


def _idle(frame: FrameType | None) -> bool:
    """Whether it is a pool's thread that waits for work: Python ends those."""
    return frame is not None and frame.f_code is WORKER


def _leave(code: int) -> None:
    """End the process without the threads that are left. Does nothing where there are none."""
    left = _living()
    if not left:
        return
    log.warning("calls that have not ended are abandoned", abandoned=", ".join(map(_doing, left)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _doing(thread: threading.Thread) -> str:
    """Its name, and where in our code it is."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(OURS):
        frame = frame.f_back
    if frame is None:
        return thread.name
    code = frame.f_code
    return f"{thread.name} ({code.co_name}, {Path(code.co_filename).relative_to(OURS)}:{frame.f_lineno})"
