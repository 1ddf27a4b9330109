"""The error tree of the SDK and of the wire.

    DSecError
    |-- InvalidArgument      the request names something that is not allowed; not run
    |-- NotFound             sandbox, process, session, environment or path is not there; not run
    |-- Conflict             the object is in a state that forbids it (names the state); not run
    |-- Denied               no or wrong credentials, or a wall of the sandbox; not run
    |-- QuotaExceeded        a limit of the caller or of the sandbox was hit (disk, size)
    |-- Overloaded           the node does not take more work now; not run, try again or elsewhere
    |-- SandboxFailed        the sandbox is gone; `cause` says why
    |-- OutcomeUnknown       it may or may not have run; never repeated by itself
    |-- Unsupported          this backend or this host cannot do it; not run
    |-- ConnectionFailed     the server could not be reached; `ran` says what is known
    `-- CommandFailed        raised by ExecResult.check() alone, never by the server; ran

Every error carries `ran`: "not-run", "ran" or "unknown". A nonzero exit of a guest's command is data, not an error.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

__all__ = [
    "CommandFailed",
    "Conflict",
    "ConnectionFailed",
    "DSecError",
    "Denied",
    "InvalidArgument",
    "NotFound",
    "OutcomeUnknown",
    "Overloaded",
    "QuotaExceeded",
    "Ran",
    "SandboxFailed",
    "Unsupported",
    "error_from_wire",
]

Ran = Literal["not-run", "ran", "unknown"]


class DSecError(Exception):
    """Base of all errors. `field` names the offending argument, `cause` the machine-readable reason, `ran` whether it ran."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    default_ran: ClassVar[Ran] = "unknown"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        cause: str | None = None,
        ran: Ran | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        # Names in it that are not UTF-8, or were cut within a character, are told with escapes: no wire and no record carries surrogates.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.field = field
        self.cause = cause
        self.ran: Ran = ran if ran is not None else self.default_ran
        self.details = details or {}

    def to_wire(self) -> dict[str, Any]:
        """The JSON body of an error response."""
        body: dict[str, Any] = {"code": self.code, "message": self.message, "ran": self.ran}
        for name in ("field", "cause", "details"):
            value = getattr(self, name)
            if value:
                body[name] = value
        return {"error": body}


class InvalidArgument(DSecError):
    """A value is not allowed; `field` names it and the message says what is."""

    code = "invalid_argument"
    http_status = 400
    default_ran: ClassVar[Ran] = "not-run"


class NotFound(DSecError):
    """The object named is not there."""

    code = "not_found"
    http_status = 404
    default_ran: ClassVar[Ran] = "not-run"


class Conflict(DSecError):
    """The object is in a state that forbids the request."""

    code = "conflict"
    http_status = 409
    default_ran: ClassVar[Ran] = "not-run"


class Denied(DSecError):
    """Missing or wrong credentials, or a permission inside the sandbox."""

    code = "denied"
    http_status = 403
    default_ran: ClassVar[Ran] = "not-run"


class QuotaExceeded(DSecError):
    """A limit was hit: disk, body size, number of sandboxes."""

    code = "quota_exceeded"
    http_status = 413
    default_ran: ClassVar[Ran] = "not-run"


class Overloaded(DSecError):
    """The node takes no more work now. Nothing ran: retry later or elsewhere. Where `ran` is "ran", all is done (a sandbox is stopped, say)
    and the node's full disk alone does not take the record of it."""

    code = "overloaded"
    http_status = 503
    default_ran: ClassVar[Ran] = "not-run"


class SandboxFailed(DSecError):
    """The sandbox failed; `cause` is one of `schema.FailureCause`."""

    code = "sandbox_failed"
    http_status = 410
    default_ran: ClassVar[Ran] = "unknown"


class OutcomeUnknown(DSecError):
    """The request was sent and its outcome was lost. Ask for the operation's record by its id; do not repeat blindly."""

    code = "outcome_unknown"
    http_status = 502
    default_ran: ClassVar[Ran] = "unknown"


class Unsupported(DSecError):
    """The backend or the host lacks it. Raised at create, not at use, wherever that is possible."""

    code = "unsupported"
    http_status = 501
    default_ran: ClassVar[Ran] = "not-run"


class ConnectionFailed(DSecError):
    """The server could not be reached."""

    code = "connection_failed"
    http_status = 502
    default_ran: ClassVar[Ran] = "not-run"


class CommandFailed(DSecError):
    """A command did not exit with 0, and its caller asked by ExecResult.check() that this be an error.

    `details` has the result's numbers.
    """

    code = "command_failed"
    default_ran: ClassVar[Ran] = "ran"


_BY_CODE: dict[str, type[DSecError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        NotFound,
        Conflict,
        Denied,
        QuotaExceeded,
        Overloaded,
        SandboxFailed,
        OutcomeUnknown,
        Unsupported,
        ConnectionFailed,
        DSecError,
    )
}


def error_from_wire(body: Any, status: int) -> DSecError:
    """Rebuild the typed error from an error response's decoded body; unknown codes become `DSecError`."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return DSecError(f"HTTP {status} with no DSec error body: {body!r:.200}", cause=f"http-{status}")
    cls = _BY_CODE.get(str(error.get("code")), DSecError)
    return cls(
        str(error.get("message", "")),
        field=error.get("field"),
        cause=error.get("cause"),
        ran=error.get("ran"),
        details=error.get("details"),
    )
