"""The application: Litestar's routing and OpenAPI over the edge."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from litestar import Litestar
from litestar.datastructures import State
from litestar.openapi import OpenAPIConfig
from litestar.types import ASGIApp

from dsec.apiserver.abandon import CancelAbandoned
from dsec.apiserver.auth import RequireToken
from dsec.apiserver.contract import EdgeApi
from dsec.apiserver.document import DESCRIPTION, Document
from dsec.apiserver.failures import answer_error
from dsec.apiserver.holds import Holds
from dsec.apiserver.metrics import Measure, Metrics
from dsec.apiserver.routes import environments, files, node, ports, processes, sandboxes, sessions, streams, tree
from dsec.apiserver.shortcut import Shortcut
from dsec.apiserver.wire import WireRequest, WireResponse

__all__ = ["create_app", "create_litestar"]


try:
    __version__ = version("dsec")
except PackageNotFoundError:  # a source tree on the path
    __version__ = "0"

ROUTES = [
    *node.ROUTES,
    *sandboxes.ROUTES,
    *processes.ROUTES,
    *streams.ROUTES,
    *sessions.ROUTES,
    *files.ROUTES,
    *tree.ROUTES,
    *ports.ROUTES,
    *environments.ROUTES,
]


def create_litestar(edge: EdgeApi, metrics: Metrics | None = None, holds: Holds | None = None) -> Litestar:
    """Litestar with all routes, bare: no authentication, no measuring, no cancelling. OpenAPI at /schema/openapi.json."""
    return Litestar(
        route_handlers=ROUTES,
        state=State({"edge": edge, "metrics": metrics or Metrics(), "holds": holds or Holds()}),
        request_class=WireRequest,
        response_class=WireResponse,
        exception_handlers={Exception: answer_error},
        openapi_config=OpenAPIConfig(
            title="DSec",
            version=__version__,
            description=DESCRIPTION,
            use_handler_docstrings=True,
            path="/schema",
            render_plugins=[Document()],
        ),
        logging_config=None,
        request_max_body_size=None,
    )


def create_app(edge: EdgeApi, token: str | None = None, holds: Holds | None = None) -> ASGIApp:
    """The complete ASGI application. With `token`, every request but health must carry it."""
    metrics = Metrics()
    app: ASGIApp = Measure(CancelAbandoned(Shortcut(create_litestar(edge, metrics, holds), edge, metrics)), metrics)
    return RequireToken(app, token) if token is not None else app
