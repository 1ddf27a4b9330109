"""The launcher: one small process a node that forks an aether for each sandbox, so that the big Python process never forks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from dsec.backends.container import wire
from dsec.backends.container.frames import encode_frame
from dsec.backends.container.threads import in_thread
from libdsec.errors import DSecError, SandboxFailed

__all__ = ["Launcher"]

# Freed memory is joined at once, so that the heap of an aether can shrink to what it holds.
ENVIRONMENT: Final = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
SEND_BUFFER: Final = 1 << 20
SEND_SECONDS: Final = 10.0
EXIT_SECONDS: Final = 5.0


class Launcher:
    """Started by `begin`, at the first need, and again if it died. The aethers it forked live on without it."""

    def __init__(self, binary: Path, log: Path, group: str | None) -> None:
        self._binary = binary
        self._log = log
        self._group = group
        self._sock: socket.socket | None = None
        self._pids: list[int] = []
        self.starts = 0
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Of the one started last; 0 if there is none."""
        return self._pids[-1] if self._pids else 0

    def died(self) -> bool:
        """Whether it is gone, and with it perhaps a LAUNCH that it had not read. The next launch starts another."""
        if self._sock is None:
            return True
        try:
            gone = self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            gone = True
        if gone:
            self._discard()
        return gone

    def dying(self) -> SandboxFailed:
        """What to tell of one that does not live."""
        return SandboxFailed(f"the launcher dies as it starts; {self._log} says why", cause="launch-failed", ran="not-run")

    async def begin(self) -> None:
        """So that the first sandbox need not wait for it. What fails here, the first launch meets and tells."""
        async with self._lock:
            if self._sock is None:
                with contextlib.suppress(OSError, DSecError):
                    await in_thread(self._start)

    async def launch(self, payload: bytes, birth: socket.socket) -> None:
        """Hand a LAUNCH and its birth connection over. Raises SandboxFailed(cause="launch-failed") if that cannot be done; not run then."""
        frame = encode_frame(wire.LAUNCH, payload)
        async with self._lock:
            for attempt in (1, 2):
                if self._sock is None:
                    await in_thread(self._start)
                sock = self._sock
                assert sock is not None
                try:
                    # The descriptor goes with the first byte; a frame cut in the middle would leave the launcher out of step for ever.
                    async with asyncio.timeout(SEND_SECONDS):
                        await self._send(sock, frame, birth)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._discard()
                    if attempt == 2:
                        raise self.dying() from None
                except BaseException:
                    self._discard()
                    raise

    async def _send(self, sock: socket.socket, frame: bytes, birth: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sent = socket.send_fds(sock, [frame], [birth.fileno()], socket.MSG_NOSIGNAL)
                break
            except BlockingIOError:
                await _writable(loop, sock)
        if sent < len(frame):
            await loop.sock_sendall(sock, memoryview(frame)[sent:])

    def _start(self) -> None:
        if not os.access(self._binary, os.X_OK):
            raise SandboxFailed(f"{self._binary} is not there; build it with `make -C native`", cause="launch-failed", ran="not-run")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
                ours.setblocking(False)
                null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                undo_files = [null]
                try:
                    log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                    undo_files.append(log)
                    # setsid: a Ctrl-C at edge's terminal is not for the sandboxes. posix_spawn: no copy of edge's page tables.
                    pid = os.posix_spawn(
                        self._binary,
                        [str(self._binary), "launcher", str(wire.LAUNCH_VERSION)],
                        ENVIRONMENT,
                        file_actions=[
                            (os.POSIX_SPAWN_DUP2, null, 0),
                            (os.POSIX_SPAWN_DUP2, null, 1),
                            (os.POSIX_SPAWN_DUP2, log, 2),
                            (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                        ],
                        setsid=True,
                        setsigmask=[],
                    )
                    self._pids.append(pid)
                finally:
                    for fd in undo_files:
                        os.close(fd)
            if self._group is not None:
                with contextlib.suppress(OSError):
                    Path(self._group, "cgroup.procs").write_text(str(pid))
            undo.pop_all()
        self._sock = ours
        self.starts += 1

    def _discard(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._reap()

    def _reap(self) -> bool:
        """Whether all have ended. One that was let go may take a moment, so those before the last are kept in mind too."""
        for pid in list(self._pids):
            try:
                done, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done = pid
            if done:
                self._pids.remove(pid)
        return not self._pids

    async def aclose(self) -> None:
        """End it, by closing its socket. Its aethers stay."""
        async with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
            deadline = asyncio.get_running_loop().time() + EXIT_SECONDS
            while not self._reap():
                if asyncio.get_running_loop().time() > deadline:
                    raise DSecError(f"launchers {self._pids} do not exit", ran="ran")
                await asyncio.sleep(0.002)


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(sock.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_writer(sock.fileno())
