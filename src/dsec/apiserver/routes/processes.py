"""Commands: run and waited for, started, asked about by their operation id, signalled."""

from __future__ import annotations

from typing import Annotated

from litestar import get, post
from litestar.params import FromPath, JSONBody, QueryParameter

from dsec.apiserver.counted import counted_exec
from dsec.apiserver.holds import HOLD_SECONDS_MOST
from dsec.apiserver.state import edge_of, holds_of, metrics_of
from dsec.apiserver.wire import WireRequest
from libdsec.errors import DSecError
from libdsec.schema import ExecRequest, ExecResult, ProcessInfo, SignalRequest, StreamOutput

__all__ = ["ROUTES"]

_AT = "/v1/sandboxes/{sandbox_id:str}"
MAX_WAIT_SECONDS = 3600.0
OutputStream = Annotated[int, QueryParameter(ge=1, le=2, description="1 is stdout, 2 is stderr.")]
OutputOffset = Annotated[int, QueryParameter(ge=0)]
OutputLimit = Annotated[int, QueryParameter(ge=1, le=16 << 20)]
HoldSeconds = Annotated[float, QueryParameter(ge=0, le=HOLD_SECONDS_MOST)]
WaitSeconds = Annotated[float, QueryParameter(ge=0, le=MAX_WAIT_SECONDS)]


@post(_AT + "/exec", tags=["processes"], status_code=200)
async def exec_command(request: WireRequest, sandbox_id: FromPath[str], data: JSONBody[ExecRequest]) -> ExecResult:
    """Run a command and wait. A client that leaves stops waiting, not the command; its result stays under its `op_id`."""
    return await counted_exec(metrics_of(request), edge_of(request), sandbox_id, data)


@get(_AT + "/processes", tags=["processes"])
async def list_processes(request: WireRequest, sandbox_id: FromPath[str]) -> list[ProcessInfo]:
    """Running and, from the records, finished ones."""
    return list(await edge_of(request).processes(sandbox_id))


@post(_AT + "/processes", tags=["processes"])
async def start_process(
    request: WireRequest, sandbox_id: FromPath[str], data: JSONBody[ExecRequest], hold: HoldSeconds = 0.0
) -> ProcessInfo:
    """Start a command and answer at once. For `hold` seconds its output waits for a stream to be opened, and none is dropped."""
    execs = metrics_of(request).execs
    try:
        started = await edge_of(request).start(sandbox_id, data)
    except DSecError as error:
        execs.labels(error.code).inc()
        raise
    execs.labels("started").inc()
    if hold > 0 and started.state == "running":
        await holds_of(request).keep(edge_of(request), sandbox_id, started.op_id, hold)
    return started


@get(_AT + "/processes/{op_id:str}", tags=["processes"])
async def get_process(request: WireRequest, sandbox_id: FromPath[str], op_id: FromPath[str]) -> ProcessInfo:
    """One process, its result without the output."""
    return await edge_of(request).process(sandbox_id, op_id)


@get(_AT + "/processes/{op_id:str}/result", tags=["processes"])
async def get_result(
    request: WireRequest,
    sandbox_id: FromPath[str],
    op_id: FromPath[str],
    wait: WaitSeconds = 0.0,
) -> ExecResult:
    """The recorded result with the kept output; waits up to `wait` seconds. Conflict with cause `running` where it has not ended."""
    if wait > 0:
        # Who waits for the result does not come for the stream, and a full stream would hold the process up.
        holds_of(request).release(sandbox_id, op_id)
    return await edge_of(request).result(sandbox_id, op_id, wait)


@get(_AT + "/processes/{op_id:str}/output", tags=["processes"])
async def get_output(
    request: WireRequest,
    sandbox_id: FromPath[str],
    op_id: FromPath[str],
    stream: OutputStream = 1,
    offset: OutputOffset = 0,
    limit: OutputLimit = 1 << 20,
) -> StreamOutput:
    """Kept output of one stream from `offset` on, at most `limit` bytes; of a running command what is there now."""
    return await edge_of(request).output(sandbox_id, op_id, stream, offset, limit)


@post(_AT + "/processes/{op_id:str}/signal", tags=["processes"], status_code=204)
async def signal_process(request: WireRequest, sandbox_id: FromPath[str], op_id: FromPath[str], data: JSONBody[SignalRequest]) -> None:
    """Send a signal to the leader or to the whole tree."""
    await edge_of(request).signal(sandbox_id, op_id, data)


ROUTES = [exec_command, list_processes, start_process, get_process, get_result, get_output, signal_process]
