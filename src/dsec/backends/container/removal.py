"""The end of a sandbox: aether is asked to end it, and whatever it leaves, or leaves undone because it is dead, is removed here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from dsec.backends.container import wire
from dsec.backends.container.conversation import RequestConversation, connect
from dsec.kernel.pidfd import has_ended, open_process, send_signal
from dsec.network.nat import NatNetwork
from dsec.resources.cgroups import CgroupDriver
from libdsec.errors import DSecError

__all__ = ["Remains", "stop"]

STOP_SECONDS: Final = 20.0
DEATH_SECONDS: Final = 5.0


class _Releases(Protocol):
    def release(self, owner: str) -> None: ...


class _Destroys(Protocol):
    def destroy(self, sandbox_id: str) -> None: ...


async def stop(path: str) -> int | None:
    """Ask aether to end its sandbox and itself. A descriptor of the process if it says that it did: `Remains.clear` takes it. None, without
    an error, if it is dead or does not answer."""
    try:
        sock = await connect(path)
    except DSecError:
        return None
    # aether's, as it was when it began to listen
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    conversation = RequestConversation(asyncio.get_running_loop(), sock, path)
    aether: int | None = None
    try:
        with contextlib.suppress(OSError):
            aether = open_process(pid)
        await conversation.request(wire.STOP, expect=wire.OK, seconds=STOP_SECONDS)
    except BaseException as error:
        if aether is not None:
            os.close(aether)
        if not isinstance(error, DSecError):
            raise
        return None
    finally:
        conversation.close()
    return aether


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

    def clear(self, stopped: int | None) -> None:
        """Remove everything, trying all steps before raising what failed. `stopped`: what `stop` gave, closed here."""
        failures: list[str] = []

        def attempt(what: str, step: Callable[[], None]) -> None:
            try:
                step()
            except (DSecError, OSError) as error:
                failures.append(f"{what}: {error}")

        if stopped is None:
            attempt("aether", self._kill_aether)
            attempt("processes", lambda: self._cgroups.kill(self.sandbox_id))
        attempt("cgroups", lambda: self._cgroups.remove(self.sandbox_id))
        attempt("network", lambda: self._nat.detach(self.sandbox_id))
        if not failures:
            # Files and ids are given back only when nothing can be using them.
            attempt("scratch", lambda: self._scratch.destroy(self.sandbox_id))
            attempt("layers", lambda: self._layers.release(self.sandbox_id))
        if stopped is not None:
            attempt("aether", lambda: self._see_off(stopped))
        if not failures:
            attempt("socket", lambda: _unlink(self.socket_path))
        if failures:
            raise DSecError(f"{self.sandbox_id} is not wholly removed: {'; '.join(failures)}", cause="leak", ran="ran")

    def _see_off(self, aether: int) -> None:
        """It has answered and is on its way out; done is done when it is gone."""
        try:
            if not has_ended(aether, DEATH_SECONDS):
                raise DSecError(f"the aether of {self.sandbox_id} does not end", cause="leak", ran="ran")
        finally:
            os.close(aether)

    def _kill_aether(self) -> None:
        """One that is there but does not stop: it hangs, is stopped by a signal, or takes no more connections.

        It is known by the socket that is bound to its path, which needs no answer of it, and holds too after a restart that could not
        adopt the sandbox. Raises DSecError if it outlives this.
        """
        with contextlib.ExitStack() as stack:
            for fd in _bound(self.socket_path):
                stack.callback(os.close, fd)
                send_signal(fd, signal.SIGKILL)
                if not has_ended(fd, DEATH_SECONDS):
                    raise DSecError(f"the aether of {self.sandbox_id} does not die", cause="leak", ran="ran")


def _bound(path: str) -> Iterator[int]:
    """Descriptors of the processes called aether that hold a socket bound to `path`, listening or not yet; the caller closes them."""
    # Accepted connections carry the path of their listener too: what tells them apart is the state, 01 for "not connected".
    sockets: set[str] = set()
    for line in Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines():
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[7] == path and fields[5] == "01":
            sockets.add(f"socket:[{fields[6]}]")
    for pid in map(int, filter(str.isdigit, os.listdir("/proc") if sockets else ())):
        if _name(pid) != "aether" or (fd := open_process(pid)) is None:
            continue
        # Looked at only now that the descriptor is taken: before, the pid could have gone to another process.
        if sockets & _files(pid):
            yield fd
        else:
            os.close(fd)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _files(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
