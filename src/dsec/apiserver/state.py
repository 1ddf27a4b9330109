"""What the routes share, kept in Litestar's application state."""

from __future__ import annotations

from typing import Any, cast

from litestar.connection import ASGIConnection

from dsec.apiserver.contract import EdgeApi
from dsec.apiserver.holds import Holds
from dsec.apiserver.metrics import Metrics

__all__ = ["edge_of", "holds_of", "metrics_of"]


def edge_of(connection: ASGIConnection[Any, Any, Any, Any]) -> EdgeApi:
    """The edge that this application serves."""
    return cast("EdgeApi", connection.scope["litestar_app"].state.edge)


def holds_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Holds:
    """The streams that wait for their clients."""
    return cast("Holds", connection.scope["litestar_app"].state.holds)


def metrics_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Metrics:
    """The application's metrics."""
    return cast("Metrics", connection.scope["litestar_app"].state.metrics)
