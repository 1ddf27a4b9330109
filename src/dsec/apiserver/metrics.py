"""Prometheus metrics: what was asked and how long it took, what lives, what is open."""

from __future__ import annotations

import os
import time
from collections import Counter as Counting
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dsec.apiserver.contract import EdgeApi

__all__ = ["CONTENT_TYPE", "Measure", "Metrics"]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STATES = ("creating", "running", "pausing", "paused", "resuming", "stopping", "stopped", "failed")


class Metrics:
    """One application's metrics, in a registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.creates = Counter("dsec_creates", "Sandboxes asked for, by outcome.", ["outcome"], registry=self._registry)
        self.execs = Counter("dsec_execs", "Commands run or started, by outcome of the request.", ["outcome"], registry=self._registry)
        self._seconds = Histogram(
            "dsec_request_seconds",
            "Time to the end of the answer.",
            ["method", "route", "status"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._streams = Gauge("dsec_open_streams", "WebSockets that are open.", ["route"], registry=self._registry)
        self._sandboxes = Gauge("dsec_sandboxes", "Sandboxes by state.", ["state"], registry=self._registry)
        self._fds = Gauge("dsec_open_fds", "Open descriptors of this process.", registry=self._registry)
        self._children: dict[tuple[str, str, int], Any] = {}

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request ended. Looking a labelled child up costs more than counting it: they are kept."""
        key = (method, route, status)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._seconds.labels(method, route, str(status))
        child.observe(seconds)

    def stream(self, route: str, change: int) -> None:
        """A WebSocket opened (1) or closed (-1)."""
        self._streams.labels(route).inc(change)

    async def render(self, edge: EdgeApi) -> bytes:
        """The exposition, with what is only known by asking filled in."""
        counts: Counting[str] = Counting(sandbox.state for sandbox in await edge.list())
        for state in _STATES:
            self._sandboxes.labels(state).set(counts.get(state, 0))
        self._fds.set(len(os.listdir("/proc/self/fd")) - 1)
        return generate_latest(self._registry) + _exposed(edge.metrics())


def _exposed(edge: dict[str, float]) -> bytes:
    """The edge's own numbers, which are kept there as plain ones."""
    lines: list[str] = []
    for name, value in sorted(edge.items()):
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE dsec_edge_{name} {kind}", f"dsec_edge_{name} {value:g}"]
    return "".join(f"{line}\n" for line in lines).encode()


class Measure:
    """ASGI wrapper that counts and times by route, not by path: ids would make a series of each sandbox."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._stream(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 499  # nobody was left to be answered

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route: str = scope.get("path_template") or "none"
            self._metrics.request(scope["method"], route, status, time.perf_counter() - begun)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The route is known when Litestar has found it, which is before it accepts.
        counted: str | None = None

        async def noting(message: Any) -> None:
            nonlocal counted
            if message["type"] == "websocket.accept":
                counted = str(scope.get("path_template") or "none")
                self._metrics.stream(counted, 1)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if counted is not None:
                self._metrics.stream(counted, -1)
