"""The application: Litestar's routing and OpenAPI over the edge."""

from __future__ import annotations

from litestar import Litestar
from litestar.datastructures import State
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import ASGIApp

import dsec
from dsec.apiserver.abandon import CancelAbandoned
from dsec.apiserver.auth import RequireToken
from dsec.apiserver.contract import EdgeApi
from dsec.apiserver.failures import answer_error
from dsec.apiserver.routes import environments, files, node, processes, sandboxes, sessions, streams, tree
from dsec.apiserver.wire import WireRequest, WireResponse

__all__ = ["create_app", "create_litestar"]


ROUTES = [
    *node.ROUTES,
    *sandboxes.ROUTES,
    *processes.ROUTES,
    *streams.ROUTES,
    *sessions.ROUTES,
    *files.ROUTES,
    *tree.ROUTES,
    *environments.ROUTES,
]


def create_litestar(edge: EdgeApi) -> Litestar:
    """Litestar with all routes, bare: no authentication and no cancelling of abandoned requests. OpenAPI at /schema/openapi.json."""
    return Litestar(
        route_handlers=ROUTES,
        state=State({"edge": edge}),
        request_class=WireRequest,
        response_class=WireResponse,
        exception_handlers={Exception: answer_error},
        openapi_config=OpenAPIConfig(
            title="DSec",
            version=getattr(dsec, "__version__", "1"),
            path="/schema",
            render_plugins=[JsonRenderPlugin()],
        ),
        logging_config=None,
        request_max_body_size=None,
    )


def create_app(edge: EdgeApi, token: str | None = None) -> ASGIApp:
    """The complete ASGI application. With `token`, every request but health must carry it."""
    app: ASGIApp = CancelAbandoned(create_litestar(edge))
    return RequireToken(app, token) if token is not None else app
