"""The bearer token of the TCP listener. The Unix socket needs none: its mode is the credential."""

from __future__ import annotations

import hmac

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from dsec.apiserver.wire import Answer
from libdsec.errors import Denied

__all__ = ["RequireToken"]

_OPEN_PATHS = frozenset({"/v1/health"})


class RequireToken:
    """Lets through what carries `Authorization: Bearer TOKEN`. Health is open, for load balancers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        if not token:
            raise ValueError("an empty token would let everybody in")
        self._app = app
        self._expected = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _OPEN_PATHS or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = Denied("a valid bearer token is needed", field="authorization", cause="token")
        body = msgspec.json.encode(error.to_wire())
        if scope["type"] == ScopeType.WEBSOCKET:
            await send({"type": "websocket.close", "code": 4403, "reason": "denied"})
            return
        await Answer(401, body, b"application/json", [(b"www-authenticate", b"Bearer")])(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        # Compared in constant time: the time of an early mismatch would tell the token byte by byte.
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(b" "), self._expected)
