"""One connection to aether: a non-blocking Unix socket under the event loop, frames in, frames out.

Raw sockets and `add_reader` instead of streams: an exec is one connect, one send and one or two reads, and a transport with its protocol
objects would cost more than those.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from typing import ClassVar, Final

from dsec.backends.container import wire
from dsec.backends.container.failures import channel_closed, error_from_fields
from dsec.backends.container.frames import Fields, Frame, FrameDecoder, MalformedFrame, encode_frame
from libdsec.errors import DSecError, OutcomeUnknown, Overloaded

__all__ = ["Conversation", "RequestConversation", "connect", "lives"]

CONNECT_SECONDS: Final = 10.0
SMALL_READ: Final = 32 << 10
LARGE_READ: Final = 1 << 20
QUEUE_FRAMES: Final = 64
MAX_FDS: Final = 4
PROOF_SECONDS: Final = 2.0


async def connect(path: str) -> socket.socket:
    """A connected, non-blocking socket. A Unix connect completes at once, or gives EAGAIN for a full backlog: then it is retried.

    Raises SandboxFailed(cause="channel-closed") if nobody listens and Overloaded if the backlog stays full; nothing was sent then.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        try:
            sock.connect(path)
            return sock
        except BlockingIOError:
            pass
        deadline = time.monotonic() + CONNECT_SECONDS
        pause = 0.001
        while time.monotonic() < deadline:
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)
            try:
                sock.connect(path)
            except BlockingIOError:
                continue
            return sock
    except OSError as error:
        sock.close()
        raise channel_closed(f"aether does not listen on {path}: {error.strerror}", "not-run") from error
    except BaseException:
        sock.close()
        raise
    sock.close()
    raise Overloaded(f"aether's backlog on {path} stayed full for {CONNECT_SECONDS:.0f} s")


class Conversation:
    """Base of all conversations. Subclasses get each frame in `_frame` and the end in `_lost`; both run in the event loop.

    `fds` says whether descriptors may come along; they pile up in `received_fds` until somebody takes them, and are closed at the end.
    `first` is sent before anything else is done, so that aether finds it as soon as it has accepted.
    """

    answer_seconds: ClassVar[float] = 30.0
    """An aether that is alive answers in milliseconds; one that has not by then is taken for dead."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, path: str, *, fds: bool = False, first: bytes = b"") -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._path = path
        self._decoder = FrameDecoder()
        self._read_size = SMALL_READ
        self._outgoing: deque[memoryview] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._with_fds = fds
        self._reading = True
        self.received_fds: list[int] = []
        self.closed = False
        self._judging: asyncio.Task[None] | None = None
        if first:
            self.send(first)
        loop.add_reader(self._fd, self._readable)

    def _frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def _lost(self, error: DSecError) -> None:
        """The connection ended though `close` was not called."""
        raise NotImplementedError

    def _readable(self) -> None:
        try:
            if self._with_fds:
                data, fds, _, _ = socket.recv_fds(self._sock, self._read_size, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
                self.received_fds += fds
            else:
                data = self._sock.recv(self._read_size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(f"reading from aether failed: {error.strerror}")
            return
        if not data:
            self._end("aether closed the connection")
            return
        if len(data) == self._read_size:
            self._read_size = LARGE_READ
        try:
            for frame in self._decoder.feed(data):
                if self.closed:
                    return
                self._frame(frame)
        except MalformedFrame as error:
            self._end(f"aether sent what is not a frame: {error.message}")

    def _end(self, what: str) -> None:
        if self.closed:
            return
        # Before the rest wakes up: who finds the conversation closed has to know whether the reason is still to come.
        self._judging = self._loop.create_task(self._judge(what))
        self.close()

    @property
    def _over(self) -> bool:
        """Closed, and no reason for it will come."""
        return self.closed and self._judging is None

    async def _judge(self, what: str) -> None:
        """A chronus that died alone is not the end of the sandbox: only the outcome is lost. So aether is asked whether it lives.

        That somebody listens proves nothing: a process that is killed closes its descriptors one after the other.
        """
        if await lives(self._path):
            self._lost(OutcomeUnknown(f"{what}, but the sandbox lives"))
        else:
            self._lost(channel_closed(what, "unknown"))

    def pause_reading(self) -> None:
        if self._reading and not self.closed:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def send(self, data: bytes) -> None:
        """Queue and, as far as the socket takes it, send. A connection that breaks here is reported by the reader."""
        if self.closed:
            return
        view = memoryview(data)
        if not self._outgoing:
            sent = self._send_some(view)
            if sent == len(view):
                return
            view = view[sent:]
            self._loop.add_writer(self._fd, self._writable)
        self._outgoing.append(view)

    def _send_some(self, view: memoryview) -> int:
        try:
            return self._sock.send(view, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The peer is gone. What it said last may still be readable (an ERROR frame), so the reader has to find the end.
            return len(view)

    def _writable(self) -> None:
        while self._outgoing:
            view = self._outgoing[0]
            sent = self._send_some(view)
            if sent < len(view):
                self._outgoing[0] = view[sent:]
                return
            self._outgoing.popleft()
        self._loop.remove_writer(self._fd)
        self._wake_drained()

    def _wake_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    async def drain(self) -> None:
        """Wait until all that was sent is in the kernel, or the conversation is closed."""
        while self._outgoing and not self.closed:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def lose(self, error: DSecError) -> None:
        """Hang up, and fail with `error` whoever waits here."""
        self.close()
        self._lost(error)

    def take_fd(self) -> int | None:
        return self.received_fds.pop(0) if self.received_fds else None

    def close(self) -> None:
        """Hang up. What was started goes on. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._reading:
            self._loop.remove_reader(self._fd)
        if self._outgoing:
            self._loop.remove_writer(self._fd)
            self._outgoing.clear()
        self._wake_drained()
        self._sock.close()
        for fd in self.received_fds:
            os.close(fd)
        self.received_fds.clear()


class RequestConversation(Conversation):
    """A conversation read frame by frame. The queue is bounded: a peer that sends more than is read waits in its own send."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, path: str, *, fds: bool = False, first: bytes = b"") -> None:
        super().__init__(loop, sock, path, fds=fds, first=first)
        self._frames: deque[Frame] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: DSecError | None = None

    def _frame(self, frame: Frame) -> None:
        self._frames.append(frame)
        if len(self._frames) >= QUEUE_FRAMES:
            self.pause_reading()
        self._wake()

    def _lost(self, error: DSecError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, *, patient: bool = False, seconds: float | None = None) -> Frame:
        """The next frame. Raises the error of an ERROR frame, and SandboxFailed when the channel closed or nothing came for `seconds`.

        `patient` waits for ever: there the other side speaks only when something happens.
        """
        seconds = None if patient else seconds or self.answer_seconds
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._over:
                raise channel_closed("the conversation was closed", "unknown")
            self._waiter = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(seconds, self._late, seconds)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        frame = self._frames.popleft()
        if not self._reading and len(self._frames) <= QUEUE_FRAMES // 2:
            self.resume_reading()
        if frame[0] == wire.ERROR:
            raise error_from_fields(Fields(frame[2]))
        return frame

    def _late(self, seconds: float) -> None:
        self.close()
        self._lost(channel_closed(f"aether did not answer within {seconds:g} s", "unknown"))

    def close(self) -> None:
        super().close()
        self._wake()

    async def request(self, kind: int, payload: bytes = b"", *, expect: int, seconds: float | None = None) -> Fields:
        """Send one frame and give the fields of its answer."""
        self.send(encode_frame(kind, payload))
        answer = await self.next(seconds=seconds)
        if answer[0] != expect:
            raise MalformedFrame(f"aether answered kind {kind} with kind {answer[0]}, not {expect}")
        return Fields(answer[2])


class _Proof(RequestConversation):
    """A conversation whose end needs no explanation."""

    def _end(self, what: str) -> None:
        self.lose(channel_closed(what, "not-run"))


async def lives(path: str) -> bool:
    """Whether an aether answers there."""
    try:
        sock = await connect(path)
    except DSecError:
        return False
    proof = _Proof(asyncio.get_running_loop(), sock, path, first=encode_frame(wire.HELLO))
    try:
        return (await proof.next(seconds=PROOF_SECONDS))[0] == wire.READY
    except DSecError:
        return False
    finally:
        proof.close()
