"""Every failure leaves as the error tree's wire form, with its own status."""

from __future__ import annotations

import traceback
from typing import Any

import structlog
from litestar import Request
from litestar.exceptions import HTTPException, ValidationException

from dsec.apiserver.wire import WireResponse
from libdsec.errors import DSecError, InvalidArgument, NotFound

__all__ = ["answer_error", "typed_error"]

_WIRE_NAMES = {"data": "body", "sandbox_state": "state", "idempotency_key": "idempotency-key", "content_range": "range"}
"""Of parameters whose Python names had to differ."""
_log = structlog.get_logger("dsec.apiserver")


def typed_error(error: Exception) -> tuple[DSecError, int]:
    """The error of the tree that `error` is on the wire, and its HTTP status. What nobody foresaw is logged and told as internal."""
    if isinstance(error, DSecError):
        return error, error.http_status
    if isinstance(error, ValidationException):
        first = error.extra[0] if isinstance(error.extra, list) and error.extra else {}
        key = first.get("key") or "body"
        return InvalidArgument(str(first.get("message") or error.detail), field=_WIRE_NAMES.get(key, key)), 400
    if isinstance(error, HTTPException) and error.status_code < 500:
        if error.status_code == 404:
            return NotFound("no such route", field="path", cause="route"), 404
        return InvalidArgument(error.detail, cause=f"http-{error.status_code}"), error.status_code
    # As text: some renderers of exceptions show local variables, and those hold tokens and environments.
    _log.error("request failed", error=type(error).__name__, traceback="".join(traceback.format_exception(error)))
    return DSecError("the server failed; its log says why", cause=type(error).__name__), 500


def answer_error(request: Request[Any, Any, Any], error: Exception) -> WireResponse:
    """Litestar's exception handler for everything."""
    typed, status = typed_error(error)
    # Marked, so that an answer which a sandbox's own server gave through the proxy cannot be taken for one of ours.
    return WireResponse(typed.to_wire(), status_code=status, headers={"X-DSec-Error": typed.code})
