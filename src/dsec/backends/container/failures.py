"""What goes wrong on a channel, as errors of libdsec."""

from __future__ import annotations

from typing import Final

from dsec.backends.container import wire
from dsec.backends.container.frames import Fields
from libdsec.errors import DSecError, Ran, SandboxFailed, error_from_wire

__all__ = ["channel_closed", "error_from_fields"]

_RAN: Final[tuple[Ran, Ran, Ran]] = ("not-run", "ran", "unknown")


def error_from_fields(fields: Fields) -> DSecError:
    """The typed error of an ERROR frame (or of a FILE_REPLY that carries a CODE)."""
    code = fields.text(wire.T_CODE, "internal")
    ran = fields.number(wire.T_RAN, 2)
    errno = fields.number(wire.T_ERRNO)
    body = {
        "code": code,
        # Aether still speaks, so it is what it watches over that is gone.
        "cause": "init-died" if code == SandboxFailed.code else None,
        "message": fields.text(wire.T_MESSAGE, "aether gave no reason"),
        "ran": _RAN[ran] if 0 <= ran <= 2 else "unknown",
        "field": fields.text(wire.T_FIELD) or None,
        "details": {"errno": errno} if errno else None,
    }
    return error_from_wire({"error": body}, 500)


def channel_closed(message: str, ran: Ran) -> SandboxFailed:
    """The channel is gone, and with it the sandbox."""
    return SandboxFailed(message, cause="channel-closed", ran=ran)
