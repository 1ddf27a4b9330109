"""Environments that are on the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from litestar import delete, get
from litestar.params import FromPath

from dsec.apiserver.state import edge_of
from dsec.apiserver.wire import WireRequest
from dsec.environments.deadlines import within_async
from libdsec.errors import Overloaded
from libdsec.schema import EnvironmentInfo

__all__ = ["ROUTES"]

T = TypeVar("T")
STORE_SECONDS: Final = 30.0


async def _ask_store(what: str, action: Callable[[], T]) -> T:
    """In a thread of its own: a store that hangs must not take the threads that sandboxes are made and removed in."""
    try:
        return await within_async(STORE_SECONDS, what, action)
    except TimeoutError as error:
        raise Overloaded(str(error), cause="store-lost", ran="unknown") from None


@get("/v1/environments", tags=["environments"])
async def list_environments(request: WireRequest) -> list[EnvironmentInfo]:
    """All of them."""
    environments = edge_of(request).environments
    return list(await _ask_store("list", environments.list))


@get("/v1/environments/{name:str}", tags=["environments"])
async def show_environment(request: WireRequest, name: FromPath[str]) -> EnvironmentInfo:
    """One, by `name`, `name:tag` or `name@digest`."""
    environments = edge_of(request).environments
    return await _ask_store("show", lambda: environments.show(name))


@delete("/v1/environments/{name:str}", tags=["environments"], status_code=204)
async def remove_environment(request: WireRequest, name: FromPath[str]) -> None:
    """Remove it. Conflict while a live sandbox uses it."""
    environments = edge_of(request).environments
    await _ask_store("remove", lambda: environments.remove(name))


ROUTES = [list_environments, show_environment, remove_environment]
