"""The end of a sandbox: aether is asked to end it, and whatever it leaves, or leaves undone because it is dead, is removed here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol

from dsec.backends.container import wire
from dsec.backends.container.conversation import RequestConversation, connect
from dsec.network.nat import NatNetwork
from dsec.resources.cgroups import CgroupDriver
from libdsec.errors import DSecError

__all__ = ["Remains", "stop"]

STOP_SECONDS: Final = 20.0


class _Releases(Protocol):
    def release(self, owner: str) -> None: ...


class _Destroys(Protocol):
    def destroy(self, sandbox_id: str) -> None: ...


async def stop(path: str) -> bool:
    """Ask aether to end its sandbox and itself; whether it says that it did. False, without an error, if it is dead or does not answer."""
    try:
        sock = await connect(path)
    except DSecError:
        return False
    conversation = RequestConversation(asyncio.get_running_loop(), sock, path)
    try:
        await conversation.request(wire.STOP, expect=wire.OK, seconds=STOP_SECONDS)
    except DSecError:
        return False
    finally:
        conversation.close()
    return True


class Remains:
    """What may be left of one sandbox. Blocking calls, each idempotent."""

    def __init__(
        self, sandbox_id: str, socket_path: str, cgroups: CgroupDriver, nat: NatNetwork, scratch: _Destroys, layers: _Releases
    ) -> None:
        self.sandbox_id = sandbox_id
        self.socket_path = socket_path
        self._cgroups = cgroups
        self._nat = nat
        self._scratch = scratch
        self._layers = layers

    def thaw(self) -> None:
        if self._cgroups.frozen(self.sandbox_id):
            self._cgroups.thaw(self.sandbox_id)

    def clear(self, *, stopped: bool) -> None:
        """Remove everything, trying all steps before raising what failed. `stopped`: aether has ended it in order."""
        failures: list[str] = []

        def attempt(what: str, step: Callable[[], None]) -> None:
            try:
                step()
            except (DSecError, OSError) as error:
                failures.append(f"{what}: {error}")

        if not stopped:
            attempt("aether", self._kill_aether)
            attempt("processes", lambda: self._cgroups.kill(self.sandbox_id))
        attempt("cgroups", lambda: self._cgroups.remove(self.sandbox_id))
        attempt("network", lambda: self._nat.detach(self.sandbox_id))
        if not failures:
            # Files and ids are given back only when nothing can be using them.
            attempt("scratch", lambda: self._scratch.destroy(self.sandbox_id))
            attempt("layers", lambda: self._layers.release(self.sandbox_id))
        if not failures:
            attempt("socket", lambda: _unlink(self.socket_path))
        if failures:
            raise DSecError(f"{self.sandbox_id} is not wholly removed: {'; '.join(failures)}", cause="leak", ran="ran")

    def _kill_aether(self) -> None:
        """An aether that listens but does not stop. Its pid is what the kernel notes of the listener."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.connect(self.socket_path)
            except OSError:
                return
            pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if pid <= 0:
                return
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            try:
                # If the connection still stands now that the descriptor is taken, the pid had not gone to another process before.
                if _stands(sock):
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


def _stands(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
