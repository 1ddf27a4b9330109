"""What comes in the query of the file routes: paths that need not be UTF-8, octal modes, numeric owners."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import parse_qsl

import msgspec
from litestar.connection import ASGIConnection
from litestar.params import QueryParameter

from dsec.apiserver.state import edge_of
from dsec.backends.protocol import FilesConversation
from libdsec.errors import InvalidArgument
from libdsec.schema import FileStat

__all__ = ["GuestPath", "GuestUser", "Mode", "Owner", "conversation", "parse_mode", "parse_mtime", "parse_owner", "raw_query", "sendable"]

GuestPath = Annotated[
    str, QueryParameter(description="Absolute path in the sandbox. Bytes that are not UTF-8 are percent-encoded as they are.")
]
GuestUser = Annotated[str | None, QueryParameter(description="User whose rights hold; by default the sandbox's own.")]
Mode = Annotated[str | None, QueryParameter(description="Permission bits in octal, e.g. 0644.")]
Owner = Annotated[str | None, QueryParameter(description="Numeric `uid` or `uid:gid`.")]

_OWNER = re.compile(r"^(\d{1,10})(?::(\d{1,10}))?$")
_MODE = re.compile(r"^(?:0o?)?([0-7]{1,4})$")
_ID_MAX = (1 << 32) - 2
_SECONDS_MAX = 9_000_000_000
"""Nanoseconds are told in 64 bits; the year 2255."""


def raw_query(connection: ASGIConnection[Any, Any, Any, Any], name: str, parsed: str) -> str:
    """`parsed`, or where the framework replaced bytes that are no UTF-8, the name itself with those as surrogate escapes."""
    if "\ufffd" in parsed:
        for key, value in parse_qsl(connection.scope["query_string"].decode("latin-1"), errors="surrogateescape", keep_blank_values=True):
            if key == name:
                parsed = value
    if not parsed.startswith("/"):
        raise InvalidArgument(f"{name} must be absolute, not {parsed!r:.100}", field=name)
    if "\0" in parsed:
        raise InvalidArgument(f"{name} holds a NUL byte", field=name)
    return parsed


def sendable(stat: FileStat) -> FileStat:
    """`stat` as the wire can carry it: a path or target that is not UTF-8 goes as bytes too."""
    try:
        stat.path.encode()
        if stat.target is not None:
            stat.target.encode()
    except UnicodeEncodeError:
        raw_path = stat.path.encode(errors="surrogateescape")
        raw_target = stat.target.encode(errors="surrogateescape") if stat.target is not None else None
        return msgspec.structs.replace(
            stat,
            path=raw_path.decode(errors="replace"),
            target=raw_target.decode(errors="replace") if raw_target is not None else None,
            raw_path=raw_path,
            raw_target=raw_target,
        )
    return stat


def parse_mode(text: str | None) -> int | None:
    """Permission bits of an octal text."""
    if text is None:
        return None
    found = _MODE.match(text)
    if found is None:
        raise InvalidArgument(f"mode {text!r:.20} is not octal, e.g. 0644", field="mode")
    return int(found.group(1), 8)


def parse_owner(text: str | None) -> tuple[int | None, int | None]:
    """(uid, gid) of `uid` or `uid:gid`; a missing gid is left as it is."""
    if text is None:
        return None, None
    found = _OWNER.match(text)
    numbers = [int(each) if each is not None else None for each in found.groups()] if found else [-1]
    if any(each is not None and not 0 <= each <= _ID_MAX for each in numbers):
        raise InvalidArgument(f"owner {text!r:.40} is not uid or uid:gid in numbers", field="owner")
    return numbers[0], numbers[1]


def parse_mtime(seconds: float | None) -> int | None:
    """Nanoseconds of a time of modification."""
    if seconds is None:
        return None
    if not 0 <= seconds < _SECONDS_MAX:
        raise InvalidArgument(f"mtime {seconds} is not in seconds since 1970, below {_SECONDS_MAX}", field="mtime")
    return round(seconds * 1e9)


@asynccontextmanager
async def conversation(
    connection: ASGIConnection[Any, Any, Any, Any], sandbox_id: str, user: str | None
) -> AsyncIterator[FilesConversation]:
    """A files conversation as `user`, closed at the end, which also undoes writes that were not committed."""
    talk = await edge_of(connection).files(sandbox_id, user or "")
    try:
        yield talk
    finally:
        await talk.aclose()
