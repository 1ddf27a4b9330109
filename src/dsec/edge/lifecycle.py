"""Stopping, pausing, resuming, renewing: what the machines order is done here, and requests wait here for it."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from dsec.edge.checks import check_update
from dsec.edge.core import Core
from dsec.edge.events import (
    Destroyed,
    DestroyFailed,
    Paused,
    PauseFailed,
    PauseWanted,
    Resumed,
    ResumeFailed,
    ResumeWanted,
    RetryDestroy,
    StopWanted,
    TtlSet,
)
from dsec.edge.operations import Operations
from dsec.edge.records import info_from_row, sandbox_info
from dsec.edge.sandbox import Sandbox
from libdsec.errors import Conflict, DSecError, Overloaded, SandboxFailed
from libdsec.schema import SandboxInfo, UpdateRequest

__all__ = ["Lifecycle"]

log = structlog.get_logger("dsec.edge")
RETRY_SECONDS = 0.05
"""Between two looks at what is still there when all has to go."""


class Lifecycle:
    """Performs the machines' Pause, Resume and Destroy."""

    def __init__(self, core: Core, operations: Operations) -> None:
        self._core = core
        self._operations = operations
        core.pause = self._pause
        core.resume = self._resume
        core.destroy = self._destroy

    # -- requests

    async def stop(self, sandbox_id: str) -> SandboxInfo:
        """See Edge.stop."""
        sandbox = self._core.find(sandbox_id)
        if sandbox is not None:
            self._core.apply(sandbox, StopWanted("requested"))
            # A removal that failed is tried again by the sweep; who asked is told what is left.
            while sandbox.machine.destroying:
                await asyncio.shield(sandbox.changed())
            # Who was told `stopped` must not find `failed` after a crash of the edge.
            await self._core.journal.flush_done()
            return sandbox_info(sandbox.spec, sandbox.status)
        return self._recorded(sandbox_id)

    async def stop_all(self, patience_seconds: float) -> int:
        """See Edge.stop_all."""
        core = self._core
        for sandbox in core.unremoved():
            core.apply(sandbox, StopWanted("requested"))
        deadline = asyncio.get_running_loop().time() + patience_seconds
        while (there := core.unremoved()) and (left := deadline - asyncio.get_running_loop().time()) > 0:
            for sandbox in there:
                if not sandbox.machine.destroying and sandbox.status.state in ("stopping", "failed"):
                    core.apply(sandbox, RetryDestroy())
            await asyncio.sleep(min(left, RETRY_SECONDS))
        await core.journal.flush_done()
        return len(there)

    def _recorded(self, sandbox_id: str) -> SandboxInfo:
        row = self._core.journal.sandbox(sandbox_id)
        assert row is not None, "find has seen it"
        return info_from_row(row)

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        """See Edge.pause."""
        core = self._core
        sandbox = core.living(sandbox_id)
        asked = False
        while (outcome := sandbox.machine.outcome("pause")) != "already":
            if outcome == "do":
                if asked:
                    raise sandbox.error or Conflict("the sandbox could not be paused", cause="running")
                asked = True
                core.apply(sandbox, PauseWanted())
            await asyncio.shield(sandbox.changed())
        await core.journal.flush_done()
        return sandbox_info(sandbox.spec, sandbox.status)

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        """See Edge.resume."""
        core = self._core
        sandbox = core.living(sandbox_id)
        asked = False
        while (outcome := sandbox.machine.outcome("resume")) != "already":
            if outcome == "do":
                if asked:
                    raise sandbox.error or Conflict("the sandbox could not be resumed", cause="paused")
                asked = True
                core.apply(sandbox, ResumeWanted())
            await asyncio.shield(sandbox.changed())
        return sandbox_info(sandbox.spec, sandbox.status)

    async def update(self, sandbox_id: str, request: UpdateRequest) -> SandboxInfo:
        """See Edge.update."""
        check_update(request)
        core = self._core
        sandbox = core.living(sandbox_id)
        sandbox.machine.outcome("update")
        if request.labels is not None:
            sandbox.status.labels = request.labels
        core.apply(sandbox, TtlSet(running_stop=request.ttl_running_stop, maximum=request.ttl_max, paused_stop=request.ttl_paused_stop))
        # A renewal that was answered must hold after a crash too.
        await core.journal.flush_done()
        return sandbox_info(sandbox.spec, sandbox.status)

    # -- instructions

    async def _pause(self, sandbox: Sandbox) -> None:
        if sandbox.status.state != "pausing":
            return
        await self._intent()
        try:
            await sandbox.backend.pause(sandbox.spec)
        except Exception as error:
            sandbox.error = _typed(error)
            log.warning("a pause failed", sandbox_id=sandbox.id, error=repr(error))
            self._core.apply(sandbox, PauseFailed(str(error)))
        else:
            self._core.apply(sandbox, Paused())

    async def _resume(self, sandbox: Sandbox) -> None:
        if sandbox.status.state != "resuming":
            return
        await self._intent()
        try:
            await sandbox.backend.resume(sandbox.spec)
        except Exception as error:
            sandbox.error = _typed(error)
            log.warning("a resume failed", sandbox_id=sandbox.id, error=repr(error))
            self._core.apply(sandbox, ResumeFailed(str(error)))
        else:
            self._core.apply(sandbox, Resumed())

    async def _intent(self) -> None:
        """What is about to be done is on record first: after a crash in the middle, the next start knows in what state it may be."""
        with contextlib.suppress(Overloaded):
            await self._core.journal.flush()

    async def _destroy(self, sandbox: Sandbox) -> None:
        core = self._core
        await self._operations.collect_finished(sandbox)
        await self._intent()
        try:
            async with core.slots:
                await sandbox.backend.destroy(sandbox.spec)
        except Exception as error:
            log.warning("a sandbox could not be removed", sandbox_id=sandbox.id, error=repr(error))
            await self._let_go(sandbox)
            core.apply(sandbox, DestroyFailed(str(error) or repr(error)))
            return
        await self._let_go(sandbox)
        core.counters["sandboxes_failed" if sandbox.status.state == "failed" else "sandboxes_stopped"] += 1
        core.apply(sandbox, Destroyed())

    async def _let_go(self, sandbox: Sandbox) -> None:
        self._operations.lose_running(sandbox)
        if sandbox.channel is not None:
            channel, sandbox.channel = sandbox.channel, None
            await channel.aclose()


def _typed(error: Exception) -> DSecError:
    return error if isinstance(error, DSecError) else SandboxFailed(repr(error), ran="unknown")
