"""Commands and their records: an id is run once, its result is kept outside the guest, and repeating the id reads the record."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec
import structlog

from dsec.backends.protocol import Attachment
from dsec.edge import clock
from dsec.edge.checks import check_exec, signal_number
from dsec.edge.core import Core
from dsec.edge.held import HeldAttachment
from dsec.edge.ids import new_op_id
from dsec.edge.output import RecordedAttachment, kept_output, live_output
from dsec.edge.records import decode_result, encode_request, process_info
from dsec.edge.sandbox import Operation, Sandbox
from dsec.trajectory import OpRow
from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound, OutcomeUnknown, Overloaded, SandboxFailed
from libdsec.schema import ExecRequest, ExecResult, ProcessInfo, SignalRequest, StreamOutput

__all__ = ["Operations"]

log = structlog.get_logger("dsec.edge")
ENDING = ("stopping", "stopped", "failed")
KEPT_FOR_VIEWS = 256
"""Ended commands of a sandbox that aether keeps for those who still read: each counts among the sessions that it can have."""
EVENT_SECONDS = 0.05
CAUSE_SECONDS = 1.0
"""How long a broken conversation waits to hear whether, and why, its sandbox is gone."""


class Operations:
    """exec, start and what can be asked of commands."""

    def __init__(self, core: Core) -> None:
        self._core = core
        core.session_ended = self.session_ended

    # -- requests

    async def exec(self, sandbox_id: str, request: ExecRequest) -> ExecResult:
        """See Edge.exec."""
        check_exec(request)
        core = self._core
        sandbox = core.sandboxes.get(sandbox_id)
        blob = encode_request(request)
        if request.op_id is not None and (known := await self.repeated(sandbox, sandbox_id, request.op_id, blob)) is not None:
            return known
        if sandbox is None:
            sandbox = core.living(sandbox_id)
        channel = sandbox.channel
        if sandbox.machine.status.state != "running" or channel is None:
            await core.usable(sandbox)
            # From the start: meanwhile the same id may have run.
            return await self.exec(sandbox_id, request)
        op = self.begin(sandbox, request.op_id or new_op_id(), blob, background=request.background)
        return await self.attend(sandbox, op, channel.exec(op.op_id, request))

    async def attend(self, sandbox: Sandbox, op: Operation, call: Coroutine[Any, Any, ExecResult]) -> ExecResult:
        """Wait for a call of the channel that brings the operation's end, and record it."""
        op.attended = True
        try:
            result = await call
        except DSecError as error:
            raise await self.broken(sandbox, op, error) from error
        except BaseException:
            self.leave(sandbox, op)
            raise
        self.finish(sandbox, op, result)
        if self._core.journal.congested:
            await self._core.journal.drain()
        if result.signal == signal.SIGKILL and not (result.timed_out or result.oom) and await self._was_its_end(sandbox):
            # What it wrote is on record, but it is the sandbox's end that the caller must hear of.
            raise self._core.ended(sandbox, ran="ran")
        return result

    async def start(self, sandbox_id: str, request: ExecRequest) -> ProcessInfo:
        """See Edge.start."""
        check_exec(request)
        core = self._core
        blob = encode_request(request)
        if request.op_id is not None:
            known = self._known(sandbox_id, request.op_id, blob)
            if known is not None:
                core.counters["operations_replayed"] += 1
                return known
        sandbox = core.living(sandbox_id)
        channel = sandbox.channel
        if sandbox.machine.status.state != "running" or channel is None:
            await core.usable(sandbox)
            return await self.start(sandbox_id, request)
        op = self.begin(sandbox, request.op_id or new_op_id(), blob, background=request.background)
        op.attended = True
        try:
            live = await channel.start(op.op_id, request)
        except DSecError as error:
            raise await self.broken(sandbox, op, error) from error
        except BaseException:
            self.leave(sandbox, op)
            raise
        op.pid = live.pid
        self.leave(sandbox, op)
        return process_info(op.row(sandbox_id), op.pid)

    async def processes(self, sandbox_id: str) -> list[ProcessInfo]:
        """See Edge.processes."""
        sandbox = self._core.find(sandbox_id)
        live = {} if sandbox is None else sandbox.ops
        found = {row.op_id: process_info(row) for row in self._core.journal.ops(sandbox_id) if row.op_id not in live}
        running = [process_info(op.row(sandbox_id), op.pid) for op in sorted(live.values(), key=lambda op: op.seq)]
        return [*found.values(), *running]

    async def process(self, sandbox_id: str, op_id: str) -> ProcessInfo:
        """See Edge.process."""
        sandbox = self._core.find(sandbox_id)
        if sandbox is not None and (op := sandbox.ops.get(op_id)) is not None:
            return process_info(op.row(sandbox_id), op.pid)
        return process_info(self._recorded(sandbox_id, op_id))

    async def result(self, sandbox_id: str, op_id: str, wait: float = 0.0) -> ExecResult:
        """See Edge.result."""
        sandbox = self._core.find(sandbox_id)
        op = None if sandbox is None else sandbox.ops.get(op_id)
        if op is None:
            return await self._replay(self._recorded(sandbox_id, op_id))
        if op.state == "running" and wait > 0:
            await asyncio.wait([op.wait()], timeout=wait)
        if op.state == "running":
            raise Conflict(f"operation {op_id} is still running", cause="running")
        return self._outcome(op)

    async def signal(self, sandbox_id: str, op_id: str, request: SignalRequest) -> None:
        """See Edge.signal."""
        number = signal_number(request.signal)
        sandbox = self._core.living(sandbox_id)
        channel = await self._core.usable(sandbox)
        op = sandbox.ops.get(op_id)
        if op is None:
            state = self._recorded(sandbox_id, op_id).state
            raise Conflict(f"operation {op_id} has ended", cause=state)
        if op.state != "running":
            raise Conflict(f"operation {op_id} has ended", cause=op.state)
        if self._before(sandbox, op) is not None:
            raise Conflict(f"operation {op_id} waits for its turn in its session", cause="waiting")
        await channel.signal(op.session_id or op_id, number, tree=request.tree)

    async def output(self, sandbox_id: str, op_id: str, stream: int, offset: int, limit: int) -> StreamOutput:
        """See Edge.output."""
        if stream not in (1, 2):
            raise InvalidArgument("stream is 1 (stdout) or 2 (stderr)", field="stream")
        if offset < 0 or limit < 1:
            raise InvalidArgument("offset is 0 or more, limit 1 or more", field="offset" if offset < 0 else "limit")
        sandbox = self._core.find(sandbox_id)
        op = None if sandbox is None else sandbox.ops.get(op_id)
        if sandbox is not None and op is not None and op.state == "running":
            channel = await self._core.usable(sandbox)
            if self._before(sandbox, op) is not None:
                return StreamOutput(data=b"", offset=offset, next_offset=offset)
            try:
                return await live_output(channel, op, stream, offset, limit)
            except (NotFound, OutcomeUnknown):
                # It ended, and perhaps was forgotten, between our look and aether's.
                if not await self._ends(op):
                    raise
        result = await self.result(sandbox_id, op_id)
        return kept_output(result, stream, offset, limit)

    async def attach(self, sandbox_id: str, op_id: str, *, stdout_offset: int, stderr_offset: int, credit: int) -> Attachment:
        """See Edge.attach."""
        core = self._core
        sandbox = core.find(sandbox_id)
        op = None if sandbox is None else sandbox.ops.get(op_id)
        while sandbox is not None and op is not None and (first := self._before(sandbox, op)) is not None:
            # Asked for now, aether would have to take it from the call that waits for it.
            await asyncio.wait([first.wait()])
        if sandbox is not None and op is not None and op.state == "running":
            channel = await core.usable(sandbox)
            op.views += 1
            try:
                attachment = await channel.attach(
                    op_id, session_id=op.session_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset, credit=credit
                )
            except (NotFound, OutcomeUnknown):
                # It ended, and perhaps was forgotten, between our look and aether's.
                self._unview(sandbox, op)
                if not await self._ends(op):
                    raise
            except BaseException:
                self._unview(sandbox, op)
                raise
            else:
                offsets = {1: stdout_offset, 2: stderr_offset}
                return HeldAttachment(core, sandbox, attachment, offsets, partial(self._rest, op), partial(self._unview, sandbox, op))
        return RecordedAttachment(await self.result(sandbox_id, op_id), {1: stdout_offset, 2: stderr_offset})

    def _before(self, sandbox: Sandbox, op: Operation) -> Operation | None:
        """The command of the same shell for whose end it waits, if there is one."""
        if op.session_id is None or op.state != "running":
            return None
        same = (other for other in sandbox.ops.values() if other.session_id == op.session_id and other.state == "running")
        return next((other for other in same if other.seq < op.seq), None)

    async def _rest(self, op: Operation, offsets: dict[int, int], reason: OutcomeUnknown) -> Attachment:
        """What is on record of an operation whose live view broke off; `reason` raised where it runs on."""
        if not await self._ends(op):
            raise reason
        return RecordedAttachment(self._outcome(op), offsets)

    async def _ends(self, op: Operation) -> bool:
        """Whether the operation has ended: that news may be some milliseconds behind."""
        if op.state == "running":
            await asyncio.wait([op.wait()], timeout=CAUSE_SECONDS)
        return op.state != "running"

    def _unview(self, sandbox: Sandbox, op: Operation) -> None:
        op.views -= 1
        if op.views == 0 and op.kept:
            op.kept = False
            sandbox.kept -= 1
            self.acknowledge(sandbox, op)

    # -- the record

    def begin(self, sandbox: Sandbox, op_id: str, request: bytes, *, background: bool, session_id: str | None = None) -> Operation:
        """A new operation, next in the sandbox's order. On record within milliseconds; until then aether knows the id."""
        core = self._core
        if len(sandbox.ops) >= core.settings.running_ops_per_sandbox:
            # Ended ones whose record is not yet safe are among them.
            running = sum(1 for op in sandbox.ops.values() if op.state == "running")
            if running >= core.settings.running_ops_per_sandbox:
                raise Overloaded(f"{running} operations of the sandbox are running, no more are taken", cause="operations")
        sandbox.seq += 1
        op = Operation(op_id, sandbox.seq, request, session_id=session_id, background=background, started_at=clock.now())
        sandbox.ops[op_id] = op
        if not background:
            op.busy = True
            sandbox.machine.begin_activity()
        core.journal.put_op(op.row(sandbox.id))
        core.counters["operations_started"] += 1
        return op

    def finish(self, sandbox: Sandbox, op: Operation, result: ExecResult) -> None:
        """The result is known: record it, and once it is safe tell aether to forget it."""
        op.result = result
        op.state = "exited"
        op.started_at = result.started_at or op.started_at
        op.ended_at = op.started_at + result.wall_ms / 1000
        self._core.journal.put_op(op.row(sandbox.id), partial(self._recorded_safely, sandbox, op))
        self._core.counters["operations_ended"] += 1
        self._end(sandbox, op)

    def lose(self, sandbox: Sandbox, op: Operation, outcome: DSecError) -> None:
        """There will be no result."""
        op.state = "lost"
        op.outcome = outcome
        op.ended_at = clock.now()
        self._core.journal.put_op(op.row(sandbox.id), partial(self._forget, sandbox, op))
        self._core.counters["operations_lost"] += 1
        self._end(sandbox, op)

    def _end(self, sandbox: Sandbox, op: Operation) -> None:
        op.attended = False
        if op.busy:
            op.busy = False
            self._core.end_activity(sandbox)
        op.settle()

    def _forget(self, sandbox: Sandbox, op: Operation) -> None:
        if sandbox.ops.get(op.op_id) is op:
            del sandbox.ops[op.op_id]

    def _recorded_safely(self, sandbox: Sandbox, op: Operation) -> None:
        self._forget(sandbox, op)
        # Forgotten by aether, it would be cut off for those who still read: the record may have less than they were to get.
        if op.views and sandbox.kept < KEPT_FOR_VIEWS:
            op.kept = True
            sandbox.kept += 1
        else:
            self.acknowledge(sandbox, op)

    def acknowledge(self, sandbox: Sandbox, op: Operation) -> None:
        """Let aether forget a recorded result."""
        if sandbox.channel is not None and sandbox.status.state in ("running", "pausing", "paused", "resuming"):
            sandbox.unacknowledged.append(op)
            if not sandbox.acking:
                sandbox.acking = True
                self._core.spawn(self._acknowledge(sandbox))

    async def _acknowledge(self, sandbox: Sandbox) -> None:
        # Failing is harmless: the next start finds the result still there and forgets it then.
        try:
            while sandbox.unacknowledged and sandbox.channel is not None:
                op = sandbox.unacknowledged.popleft()
                try:
                    await sandbox.channel.acknowledge(op.session_id or op.op_id, op.op_id)
                except DSecError as error:
                    log.debug("a result was not acknowledged", sandbox_id=sandbox.id, op_id=op.op_id, error=error.message)
        finally:
            sandbox.acking = False

    def leave(self, sandbox: Sandbox, op: Operation) -> None:
        """Nobody waits in a call for its end any more: the event of its end, which may have come already, has it collected."""
        op.attended = False
        if op.state == "running" and (op.collecting or op.session_id is not None):
            # A shell's commands have no event of their own: their end is waited for.
            self._core.spawn(self.collect(sandbox, op))

    async def broken(self, sandbox: Sandbox, op: Operation, error: DSecError) -> DSecError:
        """What the caller of a conversation that failed is told; the record says the same."""
        gone = isinstance(error, SandboxFailed | OutcomeUnknown) and await self._ending(sandbox, op)
        if error.ran == "not-run":
            refusal = self._core.ended(sandbox, ran="not-run") if gone else error
            op.state = "lost"
            op.outcome = refusal
            self._core.journal.forget_op(sandbox.id, op.op_id)
            self._forget(sandbox, op)
            self._end(sandbox, op)
            return refusal
        if gone:
            return self._core.ended(sandbox, ran="unknown")
        self.leave(sandbox, op)
        if not isinstance(error, SandboxFailed | OutcomeUnknown):
            return error
        return OutcomeUnknown(f"the conversation with the command broke: {error.message}", cause="conversation-broken")

    async def _was_its_end(self, sandbox: Sandbox) -> bool:
        """Whether what was killed was killed with its sandbox: that event may be some milliseconds behind."""
        if sandbox.status.state == "running":
            await asyncio.wait([sandbox.changed()], timeout=EVENT_SECONDS)
        return sandbox.status.state in ENDING

    async def _ending(self, sandbox: Sandbox, op: Operation) -> bool:
        """Whether the sandbox is at its end. A conversation breaks first; the event that says why comes on another connection."""
        deadline = asyncio.get_running_loop().time() + CAUSE_SECONDS
        while sandbox.status.state not in ("failed", "stopped") and op.state == "running":
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not (await asyncio.wait([sandbox.changed()], timeout=left))[0]:
                break
        return sandbox.status.state in ENDING

    # -- repeated ids

    async def repeated(self, sandbox: Sandbox | None, sandbox_id: str, op_id: str, request: bytes) -> ExecResult | None:
        """The result of an operation whose id is used again, waiting for it if it runs; None where the id is new."""
        op = None if sandbox is None else sandbox.ops.get(op_id)
        if op is not None:
            _same(op.request, request, op_id)
            self._core.counters["operations_replayed"] += 1
            await asyncio.shield(op.wait())
            return self._outcome(op)
        row = self._core.journal.op(sandbox_id, op_id)
        if row is None:
            return None
        _same(row.request, request, op_id)
        self._core.counters["operations_replayed"] += 1
        return await self._replay(row)

    def _known(self, sandbox_id: str, op_id: str, request: bytes) -> ProcessInfo | None:
        sandbox = self._core.sandboxes.get(sandbox_id)
        op = None if sandbox is None else sandbox.ops.get(op_id)
        if op is not None:
            _same(op.request, request, op_id)
            return process_info(op.row(sandbox_id), op.pid)
        row = self._core.journal.op(sandbox_id, op_id)
        if row is None:
            return None
        _same(row.request, request, op_id)
        return process_info(row)

    def _recorded(self, sandbox_id: str, op_id: str) -> OpRow:
        row = self._core.journal.op(sandbox_id, op_id)
        if row is None:
            raise NotFound(f"sandbox {sandbox_id} has no operation {op_id!r:.150}", field="op_id")
        return row

    async def _replay(self, row: OpRow) -> ExecResult:
        if row.state == "exited":
            return decode_result(row, await self._core.journal.output(row.sandbox_id, row.op_id))
        raise OutcomeUnknown(f"operation {row.op_id} ended with its sandbox, its outcome is not known", cause="lost")

    def _outcome(self, op: Operation) -> ExecResult:
        if op.result is not None:
            return msgspec.structs.replace(op.result, replayed=True)
        assert op.outcome is not None, "what has ended has a result or a reason"
        raise op.outcome

    # -- ends that no call waits for

    def session_ended(self, sandbox: Sandbox, session_id: str) -> None:
        """aether tells that a command ended: fetch its result, unless a call is about to bring it."""
        op = sandbox.ops.get(session_id)
        if op is None:
            if sandbox.early_ends is not None:
                sandbox.early_ends.add(session_id)
            return
        if op.state != "running" or op.collecting:
            return
        op.collecting = True
        if not op.attended:
            self._core.spawn(self.collect(sandbox, op))

    async def collect(self, sandbox: Sandbox, op: Operation) -> None:
        """Fetch the result of a command that ended, and record it."""
        op.collecting = True
        channel = sandbox.channel
        if channel is None or op.state != "running":
            return
        try:
            result = await channel.wait(op.op_id, session_id=op.session_id)
        except NotFound as error:
            if op.state == "running":
                self.lose(sandbox, op, OutcomeUnknown(f"the record of {op.op_id} is gone: {error.message}", cause="lost"))
        except DSecError as error:
            # The sandbox is on its way out, or the sweep will ask again.
            op.collecting = False
            log.info("a result could not be fetched", sandbox_id=sandbox.id, op_id=op.op_id, error=error.message)
        else:
            if op.state == "running":
                self.finish(sandbox, op, result)

    async def collect_finished(self, sandbox: Sandbox) -> None:
        """Before a sandbox is removed: results that aether has and the journal has not."""
        running = [op for op in sandbox.ops.values() if op.state == "running"]
        channel = sandbox.channel
        if not running or channel is None or sandbox.status.state == "failed":
            return
        try:
            async with asyncio.timeout(self._core.settings.collect_seconds):
                ended = {session.session_id for session in await channel.sessions() if not session.running}
                for op in running:
                    if op.op_id in ended and not op.attended:
                        await self.collect(sandbox, op)
        except (TimeoutError, DSecError) as error:
            log.warning("results were not collected before a stop", sandbox_id=sandbox.id, error=repr(error))

    def lose_running(self, sandbox: Sandbox) -> None:
        """The sandbox is gone: what ran in it has no result."""
        for op in list(sandbox.ops.values()):
            if op.state == "running":
                self.lose(sandbox, op, self._core.ended(sandbox, ran="unknown"))


def _same(first: bytes, second: bytes, op_id: str) -> None:
    # An operation found again after a crash before its request was on record has none to compare.
    if first and first != second:
        raise Conflict(f"operation id {op_id} was used for another request", field="op_id", cause="op-id-reused")
