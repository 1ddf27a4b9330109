"""Shell sessions: kept by aether, named on record here, so that a client finds its session again after the edge was restarted."""

from __future__ import annotations

import asyncio
import contextlib

from dsec.edge import clock
from dsec.edge.checks import check_session, check_session_run
from dsec.edge.core import Core
from dsec.edge.ids import new_op_id, new_session_id
from dsec.edge.operations import Operations
from dsec.edge.records import encode_request
from dsec.edge.sandbox import Sandbox
from dsec.trajectory import SessionRow
from libdsec.errors import Conflict, DSecError, NotFound
from libdsec.schema import ExecResult, SessionInfo, SessionRequest, SessionRunRequest

__all__ = ["Sessions"]


class Sessions:
    """Opening, using, closing."""

    def __init__(self, core: Core, operations: Operations) -> None:
        self._core = core
        self._operations = operations
        self._opening: dict[tuple[str, str], asyncio.Future[None]] = {}
        """By sandbox and id, those that are being opened, or undone again."""

    async def open_session(self, sandbox_id: str, request: SessionRequest) -> SessionInfo:
        """See Edge.open_session."""
        check_session(request)
        blob = encode_request(request)
        session_id = request.session_id or new_session_id()
        key = (sandbox_id, session_id)
        while (other := self._opening.get(key)) is not None:
            await asyncio.wait([other])
        if request.session_id is not None and (known := self._opened(sandbox_id, session_id, blob)) is not None:
            return _info(known)
        sandbox = self._core.living(sandbox_id)
        self._opening[key] = over = asyncio.get_running_loop().create_future()
        over.add_done_callback(lambda _: self._opening.pop(key))
        try:
            channel = await self._core.usable(sandbox)
            row = SessionRow(session_id, sandbox_id, "open", clock.now(), blob)
            with self._core.activity(sandbox):
                await channel.open_session(session_id, request)
        except asyncio.CancelledError:
            # It may be open by now, and nobody waits for it. Who repeats its id finds all of it gone.
            self._core.spawn(self._drop(sandbox, session_id)).add_done_callback(lambda _: over.set_result(None))
            raise
        except BaseException:
            over.set_result(None)
            raise
        sandbox.sessions[session_id] = row
        self._core.journal.put_session(row)
        over.set_result(None)
        return _info(row)

    def _opened(self, sandbox_id: str, session_id: str, request: bytes) -> SessionRow | None:
        """The session that a repeated id means. Conflict where it is that of another request."""
        sandbox = self._core.find(sandbox_id)
        row = None if sandbox is None else sandbox.sessions.get(session_id)
        row = row or self._core.journal.session(sandbox_id, session_id)
        if row is None:
            return None
        # One found again after a crash before its request was on record has none to compare.
        if row.request and row.request != request:
            raise Conflict(f"session id {session_id} was used for another request", field="session_id", cause="session-id-reused")
        return row

    async def sessions(self, sandbox_id: str) -> list[SessionInfo]:
        """See Edge.sessions."""
        sandbox = self._core.find(sandbox_id)
        live = {} if sandbox is None else sandbox.sessions
        recorded = {row.session_id: row for row in self._core.journal.sessions(sandbox_id)}
        return [_info(row) for row in sorted({**recorded, **live}.values(), key=lambda row: row.created_at)]

    async def run_in_session(self, sandbox_id: str, session_id: str, request: SessionRunRequest) -> ExecResult:
        """See Edge.run_in_session."""
        check_session_run(request)
        blob = encode_request(request)
        operations = self._operations
        while True:
            sandbox = self._core.sandboxes.get(sandbox_id)
            if request.op_id is not None:
                known = await operations.repeated(sandbox, sandbox_id, request.op_id, blob)
                if known is not None:
                    return known
            sandbox = self._core.living(sandbox_id)
            if sandbox.machine.status.state == "running":
                break
            await self._core.usable(sandbox)
        channel = await self._core.usable(sandbox)
        self._open(sandbox, session_id)
        op = operations.begin(sandbox, request.op_id or new_op_id(), blob, background=False, session_id=session_id)
        return await operations.attend(sandbox, op, channel.run_in_session(session_id, op.op_id, request))

    async def close_session(self, sandbox_id: str, session_id: str) -> None:
        """See Edge.close_session."""
        sandbox = self._core.find(sandbox_id)
        row = None if sandbox is None else sandbox.sessions.get(session_id)
        if sandbox is None or row is None:
            if self._core.journal.session(sandbox_id, session_id) is not None:
                return
            raise NotFound(f"sandbox {sandbox_id} has no session {session_id!r:.150}", field="session_id")
        channel = await self._core.usable(sandbox)
        with contextlib.suppress(NotFound):
            await channel.close_session(session_id)
        self._core.journal.put_session(row._replace(state="closed"))
        await self._core.journal.flush_done()
        sandbox.sessions.pop(session_id, None)

    def _open(self, sandbox: Sandbox, session_id: str) -> None:
        if session_id in sandbox.sessions:
            return
        if self._core.journal.session(sandbox.id, session_id) is not None:
            raise Conflict(f"session {session_id} is closed", cause="closed")
        raise NotFound(f"sandbox {sandbox.id} has no session {session_id!r:.150}", field="session_id")

    async def _drop(self, sandbox: Sandbox, session_id: str) -> None:
        if sandbox.channel is not None:
            try:
                await sandbox.channel.close_session(session_id)
            except DSecError:
                return


def _info(row: SessionRow) -> SessionInfo:
    return SessionInfo(session_id=row.session_id, sandbox_id=row.sandbox_id, state=row.state, created_at=row.created_at)  # type: ignore[arg-type]
