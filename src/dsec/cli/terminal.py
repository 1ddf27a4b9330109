"""This terminal as the terminal of a command in a sandbox: raw mode, window size, stdin as it comes, output as it goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Iterator

from libdsec.errors import Conflict, NotFound
from libdsec.process import Process
from libdsec.schema import ExecResult

__all__ = ["follow", "window_size"]

_READ_BYTES = 65536


def window_size() -> tuple[int, int]:
    """Rows and columns of the terminal itself, whatever COLUMNS says: that is inherited, and does not change with the window."""
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(descriptor)
            if size.lines and size.columns:
                return size.lines, size.columns
    return 24, 80


@contextlib.contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    """Keys go to the command as they are typed, Ctrl-C included; the old mode comes back whatever happens."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _pieces(descriptor: int) -> AsyncIterator[bytes]:
    """What can be read, as it comes, until its end. One piece at a time: a slow command is not read ahead of."""
    loop = asyncio.get_running_loop()
    while True:
        ready: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_reader(descriptor, _wake, ready)
        except PermissionError:  # a regular file is always ready, and epoll refuses it
            data = await _read_in_thread(descriptor)
        else:
            try:
                await ready
            finally:
                loop.remove_reader(descriptor)
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # the terminal is gone
                return
        if not data:
            return
        yield data


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _read_in_thread(descriptor: int) -> bytes:
    """In a daemon thread of its own: one that waits in read() must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bytes] = loop.create_future()

    def settle(data: bytes) -> None:
        if not done.done():
            done.set_result(data)

    def read() -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:
            data = b""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, data)

    threading.Thread(target=read, daemon=True).start()
    return await done


async def _feed(process: Process) -> None:
    """This process's stdin to the command's, then its end."""
    with contextlib.suppress(Conflict, NotFound):  # it has ended, or closed its stdin
        async for data in _pieces(0):
            await process.write_stdin(data)
        await process.close_stdin()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


async def follow(process: Process, *, terminal: bool, stdin: bool) -> ExecResult:
    """Connect this process's streams until the command ends. Without a terminal Ctrl-C goes to the command's tree; the third ends it."""
    loop = asyncio.get_running_loop()
    background: set[asyncio.Task[None]] = set()

    def spawn(work: object) -> None:
        task = loop.create_task(_quietly(work))
        background.add(task)
        task.add_done_callback(background.discard)

    interrupts = 0

    def interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        spawn(process.signal("INT" if interrupts < 3 else "KILL", tree=True))

    with contextlib.ExitStack() as stack:
        if terminal and os.isatty(0):
            stack.enter_context(_raw(0))
        if terminal:
            loop.add_signal_handler(signal.SIGWINCH, lambda: spawn(process.resize(*window_size())))
            stack.callback(loop.remove_signal_handler, signal.SIGWINCH)
        else:
            loop.add_signal_handler(signal.SIGINT, interrupt)
            stack.callback(loop.remove_signal_handler, signal.SIGINT)
        feeding = loop.create_task(_feed(process)) if stdin else None
        try:
            sys.stdout.flush()
            async for stream, data in process.output():
                _write(2 if stream == 2 and not terminal else 1, data)
            return await process.wait()
        finally:
            for task in (*background, *([feeding] if feeding else [])):
                task.cancel()
            await asyncio.gather(*background, *([feeding] if feeding else []), return_exceptions=True)


async def _quietly(work: object) -> None:
    """A signal or a resize that comes too late is nothing to tell."""
    with contextlib.suppress(Conflict, NotFound):
        await work  # type: ignore[misc]
