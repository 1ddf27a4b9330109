"""Requests as bytes: what cannot be sent is refused here, by the name of the field, before anything is."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from libdsec.errors import InvalidArgument

__all__ = ["check_seconds", "encode_body", "stdin_bytes"]

_encode = msgspec.msgpack.Encoder().encode
_UNSENDABLE = (UnicodeError, OverflowError, TypeError, ValueError, RecursionError)


def encode_body(body: msgspec.Struct) -> bytes:
    """MessagePack. InvalidArgument, not run, for text that is not Unicode, a number beyond 64 bits, or a value of a strange type."""
    try:
        return _encode(body)
    except _UNSENDABLE as error:
        raise _refusal("body", body, error) from error


def _refusal(field: str, value: Any, error: Exception) -> InvalidArgument:
    """Of the innermost struct's field: it is looked for only where something is wrong."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            part = getattr(value, name)
            try:
                _encode(part)
            except _UNSENDABLE as inner:
                return _refusal(name, part, inner)
    why = "text that is not Unicode" if isinstance(error, UnicodeError) else str(error) or type(error).__name__
    return InvalidArgument(f"{field} cannot be sent: {why}", field=field)


def check_seconds(**given: float | None) -> None:
    """InvalidArgument for what is neither None nor a finite number."""
    for field, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise InvalidArgument(f"{field} is {value!r}, not a number of seconds", field=field)


def stdin_bytes(text: str) -> bytes:
    """Text for a command's stdin, as UTF-8. InvalidArgument if it is not Unicode: bytes can be given instead."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("stdin is text that is not Unicode; give bytes", field="stdin") from error
