"""Sandboxes: made in batches, listed, changed, paused, stopped."""

from __future__ import annotations

from typing import Annotated

from litestar import delete, get, patch, post
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter

from dsec.apiserver.counted import counted_batch
from dsec.apiserver.routes.processes import WaitSeconds
from dsec.apiserver.state import edge_of, metrics_of
from dsec.apiserver.wire import WireRequest
from libdsec.errors import InvalidArgument
from libdsec.schema import BatchResult, CreateRequest, ForkRequest, PackInfo, PackRequest, SandboxInfo, SandboxState, UpdateRequest

__all__ = ["ROUTES"]


@post("/v1/sandboxes", tags=["sandboxes"])
async def create(
    request: WireRequest,
    data: JSONBody[CreateRequest],
    idempotency_key: Annotated[str | None, HeaderParameter(name="Idempotency-Key", max_length=128)] = None,
) -> BatchResult:
    """Make `count` sandboxes. The same Idempotency-Key gives the same sandboxes.

    A client that leaves before the answer leaves none behind.
    """
    return await counted_batch(metrics_of(request), edge_of(request).create(data, idempotency_key), data.count)


@post("/v1/sandboxes/{sandbox_id:str}/fork", tags=["sandboxes"])
async def fork(
    request: WireRequest,
    sandbox_id: FromPath[str],
    data: JSONBody[ForkRequest],
    idempotency_key: Annotated[str | None, HeaderParameter(name="Idempotency-Key", max_length=128)] = None,
) -> BatchResult:
    """Make `count` sandboxes that begin with the files that this one has now. The same Idempotency-Key gives the same sandboxes.

    A client that leaves before the answer leaves none behind.
    """
    return await counted_batch(metrics_of(request), edge_of(request).fork(sandbox_id, data, idempotency_key), data.count)


@post("/v1/sandboxes/{sandbox_id:str}/pack-diff", tags=["sandboxes"])
async def pack_diff(request: WireRequest, sandbox_id: FromPath[str], data: JSONBody[PackRequest], wait: WaitSeconds = 0.0) -> PackInfo:
    """Make what it has written a layer. Answers when the snapshot is taken, or up to `wait` seconds later when the layer is published.

    It goes on when its client leaves. Repeating an op_id gives the record of the first.
    """
    return await edge_of(request).pack_diff(sandbox_id, data, wait)


@get("/v1/packs/{op_id:str}", tags=["sandboxes"])
async def get_pack(request: WireRequest, op_id: FromPath[str], wait: WaitSeconds = 0.0) -> PackInfo:
    """The record of a pack, after up to `wait` seconds if it is under way. What it failed of is in its `error`."""
    return await edge_of(request).pack_info(op_id, wait)


@get("/v1/sandboxes", tags=["sandboxes"])
async def list_sandboxes(
    request: WireRequest,
    sandbox_state: Annotated[SandboxState | None, QueryParameter(name="state")] = None,
    label: FromQuery[list[str] | None] = None,
) -> list[SandboxInfo]:
    """All sandboxes, or those in a state and with every `label=key=value` given."""
    labels: dict[str, str] = {}
    for pair in label or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidArgument(f"label {pair!r} is not key=value", field="label")
        labels[key] = value
    return list(await edge_of(request).list(sandbox_state, labels or None))


@get("/v1/sandboxes/{sandbox_id:str}", tags=["sandboxes"])
async def get_sandbox(request: WireRequest, sandbox_id: FromPath[str]) -> SandboxInfo:
    """One sandbox with its story and what it uses."""
    return await edge_of(request).get(sandbox_id)


@patch("/v1/sandboxes/{sandbox_id:str}", tags=["sandboxes"])
async def update_sandbox(request: WireRequest, sandbox_id: FromPath[str], data: JSONBody[UpdateRequest]) -> SandboxInfo:
    """Change time limits and labels."""
    return await edge_of(request).update(sandbox_id, data)


@delete("/v1/sandboxes/{sandbox_id:str}", tags=["sandboxes"], status_code=200)
async def stop_sandbox(request: WireRequest, sandbox_id: FromPath[str]) -> SandboxInfo:
    """Stop it and remove all of it. Stopping twice gives the same answer."""
    return await edge_of(request).stop(sandbox_id)


@post("/v1/sandboxes/{sandbox_id:str}/pause", tags=["sandboxes"], status_code=200)
async def pause_sandbox(request: WireRequest, sandbox_id: FromPath[str]) -> SandboxInfo:
    """Freeze it; its idle clock stands still."""
    return await edge_of(request).pause(sandbox_id)


@post("/v1/sandboxes/{sandbox_id:str}/resume", tags=["sandboxes"], status_code=200)
async def resume_sandbox(request: WireRequest, sandbox_id: FromPath[str]) -> SandboxInfo:
    """Thaw a paused sandbox."""
    return await edge_of(request).resume(sandbox_id)


ROUTES = [create, fork, pack_diff, get_pack, list_sandboxes, get_sandbox, update_sandbox, stop_sandbox, pause_sandbox, resume_sandbox]
