"""A background thread with an event loop, on which the blocking twin runs the async SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

__all__ = ["Portal", "portal", "shutdown"]

T = TypeVar("T")
CLOSE_SECONDS = 5.0


class Portal:
    """One loop in one daemon thread. Calls may come from any thread, also from one whose own loop runs, as in Jupyter."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="libdsec", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def close(self) -> None:
        """End the loop and its thread. What still runs on it is cancelled; what then does not end within seconds is dropped."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._wind_up()))
        self._thread.join()

    async def _wind_up(self) -> None:
        try:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            # Of iterations that were left in the middle: each may hold a connection.
            await self._loop.shutdown_asyncgens()
        finally:
            self._loop.stop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end and give its outcome. On Ctrl-C it is cancelled, and what it does about that is waited for."""
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(settle)

        def settle(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.set_exception(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        self._loop.call_soon_threadsafe(begin)
        try:
            return outcome.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            with contextlib.suppress(BaseException):
                outcome.exception()
            raise

    def iterate(self, generator: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The async generator's items, one blocking step each."""
        try:
            while True:
                try:
                    yield self.run(_step(generator))
                except StopAsyncIteration:
                    return
        finally:
            self.run(generator.aclose())


async def _step(generator: AsyncGenerator[T, None]) -> T:
    return await anext(generator)


_lock = threading.Lock()
_current: Portal | None = None


def portal() -> Portal:
    """This process's portal, made when first needed. A forked child gets its own: threads do not survive a fork."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = Portal()
        return _current


def shutdown() -> None:
    """End this process's portal, if there is one; the next call makes another. Clients must be closed before."""
    global _current
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            _current.close()
        _current = None
