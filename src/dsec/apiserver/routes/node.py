"""The node itself."""

from __future__ import annotations

from litestar import MediaType, get
from litestar.openapi.datastructures import ResponseSpec

from dsec.apiserver.metrics import CONTENT_TYPE
from dsec.apiserver.state import edge_of, metrics_of
from dsec.apiserver.wire import Answer, WireRequest
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


@get(
    "/metrics",
    tags=["node"],
    media_type=MediaType.TEXT,
    responses={200: ResponseSpec(data_container=str, media_type=MediaType.TEXT, generate_examples=False)},
)
async def metrics(request: WireRequest) -> Answer:
    """Prometheus metrics."""
    return Answer(200, await metrics_of(request).render(edge_of(request)), CONTENT_TYPE)


ROUTES = [node, health, metrics]
