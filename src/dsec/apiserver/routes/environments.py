"""Environments that are on the node."""

from __future__ import annotations

import asyncio

from litestar import delete, get
from litestar.params import FromPath

from dsec.apiserver.state import edge_of
from dsec.apiserver.wire import WireRequest
from libdsec.schema import EnvironmentInfo

__all__ = ["ROUTES"]


@get("/v1/environments", tags=["environments"])
async def list_environments(request: WireRequest) -> list[EnvironmentInfo]:
    """All of them."""
    return list(await asyncio.to_thread(edge_of(request).environments.list))


@get("/v1/environments/{name:str}", tags=["environments"])
async def show_environment(request: WireRequest, name: FromPath[str]) -> EnvironmentInfo:
    """One, by `name`, `name:tag` or `name@digest`."""
    return await asyncio.to_thread(edge_of(request).environments.show, name)


@delete("/v1/environments/{name:str}", tags=["environments"], status_code=204)
async def remove_environment(request: WireRequest, name: FromPath[str]) -> None:
    """Remove it. Conflict while a live sandbox uses it."""
    await asyncio.to_thread(edge_of(request).environments.remove, name)


ROUTES = [list_environments, show_environment, remove_environment]
