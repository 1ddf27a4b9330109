"""Reads of a sandbox's files that failed: is it that its store is lost?

A guest's failed read names its sandbox by the cgroup of who read, and the watch fails that at its next look. What this process, or one that
serves it, reads of a sandbox does not: so here the store is looked at when such a read has failed, and the answer depends on what is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.edge.storewatch import DEAD_LOOKS, LOOK_SECONDS, SLOW_LOOK_SECONDS
from dsec.environments.deadlines import within
from libdsec.errors import DSecError, SandboxFailed

if TYPE_CHECKING:
    from dsec.edge.core import Core
    from dsec.edge.sandbox import Sandbox

__all__ = ["FailedReads"]

UNREADABLE: Final = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT})
"""How a read fails whose file system has lost its data."""
ANSWER_SECONDS: Final = 2.0
CAUSE_SECONDS: Final = 1.0
"""How long a conversation that broke waits to hear whether it was its sandbox's end."""
BLOCK_BYTES: Final = 4096


class FailedReads:
    """`explain` is asked once for each read that failed."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._access = core.environments.access

    async def explain(self, sandbox: Sandbox, since: float, error: BaseException) -> DSecError | None:
        """What to say instead of `error`, with which a use of the sandbox's files failed that began at the wall time `since`.

        Where its store is lost, the sandbox has failed by the return. None where the error is to stay what it is.
        """
        if _errno(error) in UNREADABLE:
            if not _lost(sandbox):
                await self._look(sandbox, since)
        elif isinstance(error, SandboxFailed):
            await self._changes(sandbox, CAUSE_SECONDS)
        else:
            return None
        ran = error.ran if isinstance(error, DSecError) else "unknown"
        return self._core.ended(sandbox, ran=ran) if _lost(sandbox) else None

    async def _look(self, sandbox: Sandbox, since: float) -> None:
        core = self._core
        others = set(core.sandboxes) - {sandbox.id}
        layers = [layer.rpartition("@")[2] for layer in sandbox.spec.layers]
        find = self._own_files if self._access.direct else self._events
        try:
            detail = await core.store.call(find, layers, since, others, patience_seconds=SLOW_LOOK_SECONDS)
        except SandboxFailed as silence:
            detail = silence.message
        except OSError:
            # Nobody answers for the server of packs. The watch finds out whether it is dead, and then fails all that read through it.
            await self._changes(sandbox, (DEAD_LOOKS + 2) * LOOK_SECONDS)
            return
        if detail is not None:
            core.store.fail(sandbox, detail)

    async def _changes(self, sandbox: Sandbox, seconds: float) -> None:
        if sandbox.status.state == "running":
            await asyncio.wait([sandbox.changed()], timeout=seconds)

    # -- in a thread

    def _events(self, layers: list[str], since: float, others: set[str]) -> str | None:
        """What the server of packs could not read since then of these layers, for nobody else. OSError where no server answers."""
        if not self._access.mounted():
            return None
        _, events = self._access.events(0)
        packs = self._packs(layers)
        for event in reversed(events):
            # Its clock counts whole seconds.
            if event.at >= int(since) and others.isdisjoint(event.group.split("/")) and (packs is None or event.pack in packs):
                return f"the pack {event.pack[7:19]} could not be read: {event.reason}"
        return None

    def _packs(self, layers: Iterable[str]) -> set[str] | None:
        """None where a store that is away cannot be asked."""
        manifest = self._core.environments.layers.manifest

        def ask() -> set[str]:
            return {use.digest for digest in layers for use in manifest(digest).identity.packs}

        with contextlib.suppress(DSecError, OSError):
            return within(ANSWER_SECONDS, "which packs", ask)
        return None

    def _own_files(self, layers: list[str], since: float, others: set[str]) -> str | None:
        """What is wrong with the packs that the kernel reads itself. One that is damaged within looks whole."""
        packs = self._core.environments.layers.packs
        try:
            if losses := self._core.store.flaws({digest: set() for digest in layers}):
                return losses[0].detail
            for pack in sorted(self._packs(layers) or ()):
                # Of one that was removed the kernel still holds the bytes.
                with contextlib.suppress(FileNotFoundError):
                    _read_ends(packs.data(pack))
        except (OSError, DSecError) as error:
            return f"the store does not answer: {error}"
        return None


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    return error.details.get("errno") if isinstance(error, DSecError) else None


def _lost(sandbox: Sandbox) -> bool:
    return sandbox.status.state == "failed" and sandbox.status.cause == "store-lost"


def _read_ends(path: Path) -> None:
    """Read the first and the last block, past the page cache where that can be: what is in it says nothing of the store."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            size = os.fstat(fd).st_size
            for offset in {0, max(0, size - 1) // BLOCK_BYTES * BLOCK_BYTES}:
                os.preadv(fd, [block], offset)
    finally:
        os.close(fd)
