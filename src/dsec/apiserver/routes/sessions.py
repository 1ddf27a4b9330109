"""Shell sessions, which keep their working directory and environment between commands."""

from __future__ import annotations

from litestar import delete, get, post
from litestar.params import FromPath, JSONBody

from dsec.apiserver.state import edge_of
from dsec.apiserver.wire import WireRequest
from libdsec.schema import ExecResult, SessionInfo, SessionRequest, SessionRunRequest

__all__ = ["ROUTES"]

_AT = "/v1/sandboxes/{sandbox_id:str}/sessions"


@post(_AT, tags=["sessions"])
async def open_session(request: WireRequest, sandbox_id: FromPath[str], data: JSONBody[SessionRequest]) -> SessionInfo:
    """Open a shell."""
    return await edge_of(request).open_session(sandbox_id, data)


@get(_AT, tags=["sessions"])
async def list_sessions(request: WireRequest, sandbox_id: FromPath[str]) -> list[SessionInfo]:
    """The open sessions."""
    return list(await edge_of(request).sessions(sandbox_id))


@delete(_AT + "/{session_id:str}", tags=["sessions"], status_code=204)
async def close_session(request: WireRequest, sandbox_id: FromPath[str], session_id: FromPath[str]) -> None:
    """Close it and end all that runs in it."""
    await edge_of(request).close_session(sandbox_id, session_id)


@post(_AT + "/{session_id:str}/run", tags=["sessions"], status_code=200)
async def run_in_session(
    request: WireRequest, sandbox_id: FromPath[str], session_id: FromPath[str], data: JSONBody[SessionRunRequest]
) -> ExecResult:
    """Run a command in the shell and wait; one at a time, in order."""
    return await edge_of(request).run_in_session(sandbox_id, session_id, data)


ROUTES = [open_session, list_sessions, close_session, run_in_session]
