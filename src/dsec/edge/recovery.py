"""After a restart, however the last run ended: the journal says what there should be, the backends what there is.

Living sandboxes are adopted with their commands and results; half-made ones that nobody was told of, and half-removed ones, are removed;
dead ones are marked failed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from dsec.backends.protocol import LiveSession
from dsec.edge import clock
from dsec.edge.core import Core
from dsec.edge.events import Lost, Restarted, RetryDestroy, StopWanted
from dsec.edge.machine import Status
from dsec.edge.operations import Operations
from dsec.edge.records import decode_sandbox
from dsec.edge.sandbox import Operation, Sandbox
from dsec.trajectory import SandboxRow, SessionRow
from libdsec.errors import OutcomeUnknown
from libdsec.schema import FailureCause

__all__ = ["Recovery", "rebooted"]

log = structlog.get_logger("dsec.edge")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Recovery:
    """`recover` is awaited once, before the first request is served."""

    def __init__(self, core: Core, operations: Operations) -> None:
        self._core = core
        self._operations = operations
        self._rebooted = False

    async def recover(self) -> None:
        """Bring memory, journal and host in step. One sandbox that cannot be adopted holds up no other."""
        core = self._core
        self._rebooted = rebooted(core)
        await core.journal.set_meta("boot_id", _boot_id())
        gate = asyncio.Semaphore(core.settings.adoptions_at_once)
        sandboxes = [sandbox for row in core.journal.sandboxes(living=True) if (sandbox := self._load(row)) is not None]
        for sandbox in sandboxes:
            core.sandboxes[sandbox.id] = sandbox

        async def one(sandbox: Sandbox) -> None:
            async with gate:
                try:
                    await self._recover(sandbox)
                except Exception as error:
                    log.exception("a sandbox could not be taken up again", sandbox_id=sandbox.id)
                    core.apply(sandbox, Lost("channel-closed", f"it could not be taken up again: {error}"))

        await asyncio.gather(*(one(sandbox) for sandbox in sandboxes))
        if sandboxes:
            log.info("took up sandboxes again", sandboxes=len(sandboxes))

    def _load(self, row: SandboxRow) -> Sandbox | None:
        spec, status = decode_sandbox(row)
        backend = self._core.backends.get(spec.backend)
        if backend is None:
            log.error("a recorded sandbox has a backend that this edge lacks", sandbox_id=row.sandbox_id, backend=spec.backend)
            return None
        return Sandbox(spec, backend, status)

    async def _recover(self, sandbox: Sandbox) -> None:
        core = self._core
        status = sandbox.status
        self._load_operations(sandbox)
        if status.state in ("stopping", "failed"):
            core.apply(sandbox, RetryDestroy())
            return
        if not status.told:
            core.apply(sandbox, StopWanted("sweep"))
            return
        sandbox.early_ends = set()
        channel = await sandbox.backend.adopt(sandbox.spec)
        if channel is None:
            cause: FailureCause = "node-lost" if self._rebooted else "channel-closed"
            core.apply(sandbox, Lost(cause, "it was gone when the edge came back"))
            return
        sandbox.channel = channel
        if status.state == "running":
            # The last edge may have died while it stood for a snapshot.
            await sandbox.backend.resume(sandbox.spec)
        if status.state in ("pausing", "resuming"):
            core.apply(sandbox, Restarted())
            if sandbox.work is not None:
                await asyncio.wait([sandbox.work])
        _be_patient(status, core.settings.restart_grace_seconds)
        if status.state in ("running", "paused"):
            await self._take_up(sandbox, await channel.sessions())
            core.timers.watch(sandbox)

    def _load_operations(self, sandbox: Sandbox) -> None:
        journal = self._core.journal
        sandbox.seq, last_end = journal.last_op(sandbox.id)
        if sandbox.status.idle_since is not None and sandbox.status.paused_at is None:
            sandbox.status.idle_since = max(sandbox.status.idle_since, min(last_end, clock.now()))
        for row in journal.ops(sandbox.id, running_only=True):
            op = Operation(
                row.op_id,
                row.seq,
                row.request,
                session_id=row.session_id,
                background=bool(row.background),
                started_at=row.started_at,
            )
            self._add(sandbox, op)
        sandbox.sessions = {row.session_id: row for row in journal.sessions(sandbox.id) if row.state == "open"}

    def _add(self, sandbox: Sandbox, op: Operation) -> None:
        sandbox.ops[op.op_id] = op
        if not op.background:
            op.busy = True
            sandbox.machine.begin_activity()

    async def _take_up(self, sandbox: Sandbox, sessions: list[LiveSession]) -> None:
        """Bring the operations in step with what aether has."""
        core = self._core
        operations = self._operations
        live = {session.session_id: session for session in sessions}
        for session in sorted(sessions, key=lambda session: session.started_at):
            if session.kind == "shell":
                self._take_up_shell(sandbox, session)
            elif session.session_id not in sandbox.ops:
                self._take_up_unknown(sandbox, session)
        for session_id in [session_id for session_id in sandbox.sessions if session_id not in live or not live[session_id].running]:
            core.journal.put_session(sandbox.sessions.pop(session_id)._replace(state="closed"))
        early, sandbox.early_ends = sandbox.early_ends or set(), None
        ended: list[Operation] = []
        for op in list(sandbox.ops.values()):
            if op.state != "running":
                continue
            known = live.get(op.session_id or op.op_id)
            if known is None and op.session_id is None:
                operations.lose(sandbox, op, OutcomeUnknown("the operation is not known in its sandbox any more", cause="lost"))
            elif op.session_id is not None:
                core.spawn(operations.collect(sandbox, op))
            elif known is not None:
                op.pid = known.pid
                if not known.running or op.op_id in early:
                    ended.append(op)
        for op in ended:
            await operations.collect(sandbox, op)

    def _take_up_shell(self, sandbox: Sandbox, session: LiveSession) -> None:
        if session.running and session.session_id not in sandbox.sessions:
            row = SessionRow(session.session_id, sandbox.id, "open", session.started_at, b"")
            sandbox.sessions[row.session_id] = row
            self._core.journal.put_session(row)

    def _take_up_unknown(self, sandbox: Sandbox, session: LiveSession) -> None:
        """Started in the last milliseconds before the crash, or recorded and not yet acknowledged."""
        recorded = self._core.journal.op(sandbox.id, session.session_id)
        if recorded is not None:
            op = Operation(recorded.op_id, recorded.seq, recorded.request, session_id=None, background=True, started_at=recorded.started_at)
            op.state = "exited"
            self._operations.acknowledge(sandbox, op)
            return
        sandbox.seq += 1
        op = Operation(session.session_id, sandbox.seq, b"", session_id=None, background=session.background, started_at=session.started_at)
        self._add(sandbox, op)
        self._core.journal.put_op(op.row(sandbox.id))


def rebooted(core: Core) -> bool:
    """Whether the host has been started anew since the journal was last written; before `Recovery.recover`, which notes it."""
    return core.journal.meta("boot_id") not in (None, _boot_id())


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _be_patient(status: Status, seconds: float) -> None:
    """Clients could not show activity while the edge was away: none is found idle before they had time to."""
    if status.ttl_running_stop is None or status.idle_since is None:
        return
    now = status.paused_at if status.paused_at is not None else clock.now()
    status.idle_since = max(status.idle_since, now - status.ttl_running_stop + min(seconds, status.ttl_running_stop))
