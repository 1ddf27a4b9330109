"""At the start and from time to time: what is desired, recorded and really there is compared, and the difference removed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time

import structlog

from dsec.edge import clock
from dsec.edge.core import Core
from dsec.edge.events import RetryDestroy
from dsec.edge.operations import Operations
from dsec.edge.sandbox import Sandbox
from dsec.trajectory.retention import prune
from libdsec.errors import DSecError, OutcomeUnknown

__all__ = ["Sweep"]

log = structlog.get_logger("dsec.edge")
QUIET_SECONDS = 5.0
"""An operation younger than this may be on its way to aether still."""
FIRST_GARBAGE_SECONDS = 300.0
"""After the start, when adoptions are over."""


class Sweep:
    """`run` never ends; `once` is one round."""

    def __init__(self, core: Core, operations: Operations) -> None:
        self._core = core
        self._operations = operations
        self._garbage: threading.Thread | None = None
        self._garbage_due = clock.now() + min(FIRST_GARBAGE_SECONDS, core.settings.garbage_seconds)

    async def run(self) -> None:
        """Rounds, until cancelled."""
        while True:
            await asyncio.sleep(self._core.settings.sweep_seconds)
            try:
                await self.once()
            except Exception:
                log.exception("a sweep failed")

    async def prune_as_it_grows(self) -> None:
        """Between the rounds: what writes fast must not outrun them."""
        while True:
            await self._core.journal.grown(max(1, self._core.settings.record_limit_bytes // 16))
            await self.prune()

    async def once(self) -> None:
        """Retry failed removals, reconcile operations, remove what nobody knows, drop old records."""
        core = self._core
        now = clock.now()
        for sandbox in list(core.sandboxes.values()):
            if sandbox.status.state in ("stopping", "failed"):
                core.apply(sandbox, RetryDestroy())
            elif sandbox.status.state == "running" and sandbox.ops:
                await self._reconcile(sandbox, now)
        await self.remove_unknown()
        for backend in core.backends.values():
            try:
                await backend.tidy()
            except Exception as error:
                log.error("what sandboxes left in the kernel could not be removed", backend=backend.name, error=repr(error))
        await self.prune()
        await core.in_thread(core.environments.sweep_mounts, core.owners)
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        """In a thread of its own that nobody waits for: it takes as long as the store does, and may end anywhere."""
        settings = self._core.settings
        if not settings.garbage_seconds or clock.now() < self._garbage_due or (self._garbage is not None and self._garbage.is_alive()):
            return
        self._garbage_due = clock.now() + settings.garbage_seconds
        self._garbage = threading.Thread(target=self._collect, name="store: garbage", daemon=True)
        self._garbage.start()

    def _collect(self) -> None:
        settings = self._core.settings
        try:
            report = self._core.environments.collect_garbage(
                grace_seconds=settings.garbage_grace_seconds, not_within_seconds=settings.garbage_seconds * 0.9
            )
        except DSecError as error:
            log.warning("garbage in the store could not be collected", error=error.message)
        except Exception:
            log.exception("a collection of garbage failed")
        else:
            if report.layers or report.packs or report.unreadable:
                counts = {"layers": len(report.layers), "packs": len(report.packs), "bytes": report.bytes}
                log.info("garbage in the store was collected", **counts, unreadable=report.unreadable)

    async def remove_unknown(self) -> None:
        """Snapshots, kernel objects and files of sandboxes that no record knows: another life of ours left them."""
        core = self._core
        for backend in core.backends.values():
            for name in sorted(await backend.snapshots()):
                if name not in core.snapshots:
                    core.counters["swept"] += 1
                    try:
                        await core.in_thread(core.environments.release, name)
                        await backend.drop_snapshot(name)
                    except Exception as error:
                        log.error("a snapshot could not be dropped", snapshot=name, error=repr(error))
            for sandbox_id in sorted(await backend.owned()):
                if sandbox_id in core.sandboxes:
                    continue
                row = core.journal.sandbox(sandbox_id)
                log.warning("removing what is left of a sandbox", sandbox_id=sandbox_id, recorded=row is not None)
                core.counters["swept"] += 1
                try:
                    await backend.destroy_unknown(sandbox_id)
                except Exception as error:
                    log.error("it could not be removed", sandbox_id=sandbox_id, error=repr(error))

    async def _reconcile(self, sandbox: Sandbox, now: float) -> None:
        """Operations whose end was not told, and such as never reached aether because their caller left in the middle."""
        operations = self._operations
        alone = [
            op
            for op in sandbox.ops.values()
            if op.state == "running" and not op.attended and op.session_id is None and now - op.started_at > QUIET_SECONDS
        ]
        if not alone or sandbox.channel is None:
            return
        try:
            live = {session.session_id: session for session in await sandbox.channel.sessions()}
        except DSecError:
            return
        for op in alone:
            session = live.get(op.op_id)
            if op.state != "running" or op.collecting:
                continue
            if session is None:
                operations.lose(sandbox, op, OutcomeUnknown("the operation is not known in its sandbox", cause="lost"))
            elif not session.running:
                await operations.collect(sandbox, op)

    async def prune(self) -> None:
        """Drop the records that are older, or beyond the size, that the settings allow."""
        settings = self._core.settings
        # Records carry wall time.
        before = time.time() - settings.record_hours * 3600
        more = True
        while more:
            try:
                more = await self._core.journal.run(lambda db: prune(db, before, settings.record_limit_bytes))
            except sqlite3.Error as error:
                log.warning("records could not be dropped", error=repr(error))
                return
