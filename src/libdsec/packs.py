"""Waiting for a pack, over restarts of the server too: its record is under its id."""

from __future__ import annotations

import asyncio

import msgspec

from libdsec.api import Api, segment
from libdsec.errors import OutcomeUnknown, error_from_wire
from libdsec.schema import PackInfo

__all__ = ["WAIT_SECONDS", "ask_pack", "await_pack"]

WAIT_SECONDS = 30.0
"""How long one question waits on the server before it is asked again."""


async def ask_pack(api: Api, op_id: str, wait: float) -> PackInfo:
    """The record as it is, or as it is when it has ended within `wait` seconds."""
    query = {"wait": round(wait, 3)} if wait > 0 else None
    path = f"/v1/packs/{segment(op_id)}"
    return await api.call("GET", path, PackInfo, query=query, timeout=wait + api.timeouts.request, idempotent=True)


async def await_pack(api: Api, info: PackInfo, timeout: float | None) -> PackInfo:
    """The record of one that was published. Raises why it failed; OutcomeUnknown past `timeout` seconds, and it goes on."""
    loop = asyncio.get_running_loop()
    until = None if timeout is None else loop.time() + timeout
    while info.state == "packing":
        left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, until - loop.time())
        if left <= 0:
            raise OutcomeUnknown(
                f"{info.op_id}: not published in {timeout:.1f} s; it goes on", cause="timeout", details={"op_id": info.op_id}
            )
        info = await ask_pack(api, info.op_id, left)
    if info.error is not None:
        raise error_from_wire({"error": msgspec.to_builtins(info.error)}, 500)
    return info
