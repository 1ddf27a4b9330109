"""The three requests of which there are thousands a second, past the framework: create, exec and stop.

Routing, injecting parameters and building a response take Litestar a tenth of an exec's round trip. What is served here is exactly what its
routes do, by the same functions; whatever is unusual about a request (a query, a long key, another path) goes the ordinary way, and the
OpenAPI document comes from the routes alone.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from litestar.types import ASGIApp, Receive, Scope, Send

from dsec.apiserver.contract import EdgeApi
from dsec.apiserver.counted import counted_batch, counted_exec
from dsec.apiserver.failures import typed_error
from dsec.apiserver.metrics import Metrics
from dsec.apiserver.wire import Answer, answer_of, decode_body, whole_body
from libdsec.schema import CreateRequest, ExecRequest

__all__ = ["Shortcut"]

_PATH: Final = re.compile(r"/v1/sandboxes(?:/([A-Za-z0-9_-]+)(/exec)?)?", re.ASCII)
_KEY_MOST: Final = 128


class Shortcut:
    """Wraps Litestar's application."""

    def __init__(self, app: ASGIApp, edge: EdgeApi, metrics: Metrics) -> None:
        self._app = app
        self._edge = edge
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._route(scope)
        if found is None:
            await self._app(scope, receive, send)
            return
        serve, template, status = found
        scope["path_template"] = template
        answer: Answer
        try:
            answer = answer_of(scope, status, await serve(receive))
        except Exception as error:
            typed, status = typed_error(error)
            answer = answer_of(scope, status, typed.to_wire(), [(b"x-dsec-error", typed.code.encode())])
        await answer(scope, receive, send)

    def _route(self, scope: Any) -> tuple[Callable[[Receive], Awaitable[Any]], str, int] | None:
        """What serves the request, the route's path and the status of a good answer."""
        if scope["type"] != "http" or scope["query_string"]:
            return None
        match = _PATH.fullmatch(scope["path"])
        if match is None:
            return None
        method, sandbox_id, exec_of = scope["method"], match[1], match[2]
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of two alike the first counts
        if method == "POST" and exec_of:
            return lambda receive: self._exec(sandbox_id, headers, receive), "/v1/sandboxes/{sandbox_id}/exec", 200
        if method == "DELETE" and sandbox_id and not exec_of:
            return lambda receive: self._edge.stop(sandbox_id), "/v1/sandboxes/{sandbox_id}", 200
        if method == "POST" and not sandbox_id and len(headers.get(b"idempotency-key", b"")) <= _KEY_MOST:
            return lambda receive: self._create(headers, receive), "/v1/sandboxes", 201
        return None

    async def _create(self, headers: dict[bytes, bytes], receive: Receive) -> Any:
        key = headers.get(b"idempotency-key")
        request: CreateRequest = decode_body(await whole_body(headers, receive), headers.get(b"content-type", b""), CreateRequest)
        making = self._edge.create(request, None if key is None else key.decode("latin-1"))
        return await counted_batch(self._metrics, making, request.count)

    async def _exec(self, sandbox_id: str, headers: dict[bytes, bytes], receive: Receive) -> Any:
        request: ExecRequest = decode_body(await whole_body(headers, receive), headers.get(b"content-type", b""), ExecRequest)
        return await counted_exec(self._metrics, self._edge, sandbox_id, request)
