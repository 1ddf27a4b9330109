"""The node itself."""

from __future__ import annotations

from litestar import get

from dsec.apiserver.state import edge_of
from dsec.apiserver.wire import WireRequest
from libdsec.schema import NodeInfo

__all__ = ["ROUTES"]


@get("/v1/node", tags=["node"])
async def node(request: WireRequest) -> NodeInfo:
    """What this node is and can do."""
    return await edge_of(request).node_info()


@get("/v1/health", tags=["node"])
async def health() -> dict[str, str]:
    """Answers while the server's loop turns; needs no token."""
    return {"status": "ok"}


ROUTES = [node, health]
