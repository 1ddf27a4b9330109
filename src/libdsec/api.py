"""The API's calls over a transport: structs in, structs out, typed errors, and what may be repeated after a failure.

The rules: what was not run may be sent again; reads may; what carries an id under which the server keeps a record is asked about by that
id. All else that was lost on the way is OutcomeUnknown, and nobody repeats it but the caller.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from libdsec.bodies import encode_body
from libdsec.errors import (
    Conflict,
    ConnectionFailed,
    DSecError,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    SandboxFailed,
    error_from_wire,
)
from libdsec.schema import ExecResult
from libdsec.timeouts import Timeouts
from libdsec.transport import Reply, Transport

__all__ = ["Api", "new_op_id", "segment"]

T = TypeVar("T")
MESSAGEPACK = "application/vnd.msgpack"
_HEADERS = {"Content-Type": MESSAGEPACK, "Accept": MESSAGEPACK}
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_BACKOFF_FIRST, _BACKOFF_MOST = 0.01, 1.0
RESULT_WAIT_SECONDS = 60.0
"""How long one question for a result waits on the server before it is asked again."""


def new_op_id(prefix: str = "op") -> str:
    """An id for an operation, unique among all clients."""
    return f"{prefix}-{secrets.token_hex(10)}"


def segment(text: str) -> str:
    """`text` as one segment of a URL's path. InvalidArgument if it is not Unicode."""
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{text!a} is not Unicode text", field="id") from error


def decode(reply: Reply, answer: type[T]) -> T:
    """The struct in `reply`, or its typed error raised."""
    if reply.status >= 400:
        raise decode_error(reply.status, reply.body, reply.content_type)
    if answer is type(None):
        return None
    decoder = _decoders.get(answer)
    if decoder is None:
        decoder = _decoders[answer] = msgspec.msgpack.Decoder(answer)
    result: T = decoder.decode(reply.body)
    return result


def decode_error(status: int, body: bytes, content_type: str) -> DSecError:
    """The error in a response's body, whatever wrote it."""
    decoded: Any
    try:
        decoded = msgspec.msgpack.decode(body) if content_type.startswith(MESSAGEPACK) else msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        decoded = body
    return error_from_wire(decoded, status)


def with_query(path: str, query: Mapping[str, Any] | None) -> str:
    """`path` with those of `query` that are not None; booleans as true and false."""
    if not query:
        return path
    pairs: list[tuple[str, Any]] = []
    for key, value in query.items():
        if value is None:
            continue
        if isinstance(value, list | tuple):
            pairs += [(key, each) for each in value]
        else:
            pairs.append((key, str(value).lower() if isinstance(value, bool) else value))
    return f"{path}?{urlencode(pairs)}" if pairs else path


class Backoff:
    """Growing, jittered pauses until a deadline."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + seconds
        self._next = _BACKOFF_FIRST

    async def pause(self) -> bool:
        """Wait the next pause; False, at once, when the deadline would pass."""
        left = self._until - self._loop.time()
        if left <= 0:
            return False
        await asyncio.sleep(min(left, self._next * random.uniform(0.5, 1.0)))
        self._next = min(self._next * 2, _BACKOFF_MOST)
        return True


class Api:
    """Calls of the API. One for each client."""

    def __init__(self, transport: Transport, timeouts: Timeouts) -> None:
        self.transport = transport
        self.timeouts = timeouts

    async def once(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> T:
        """One request, never repeated. What was lost on the way stays ConnectionFailed with `ran` "unknown"."""
        reply = await self.transport.call(
            method,
            with_query(path, query) if query else path,
            body=encode_body(body) if body is not None else None,
            headers=_HEADERS if headers is None else {**_HEADERS, **headers},
            timeout=timeout,
        )
        return decode(reply, answer)

    async def call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        idempotent: bool = False,
    ) -> T:
        """A request that is sent again while the server says (or it is plain) that it did not run; if `idempotent`, after a loss too."""
        limit = self.timeouts.request if timeout is None else timeout
        lost: Backoff | None = None
        refused: Backoff | None = None
        while True:
            try:
                return await self.once(method, path, answer, body=body, query=query, headers=headers, timeout=limit)
            except ConnectionFailed as error:
                again = error.ran == "not-run" or (idempotent and error.cause != "timeout")
                lost = lost or Backoff(self.timeouts.reconnect)
                if not again:
                    raise OutcomeUnknown(f"{method} {path}: {error.message}", cause=error.cause) from error
                if not await lost.pause():
                    raise
            except Overloaded:
                refused = refused or Backoff(self.timeouts.overloaded)
                if not await refused.pause():
                    raise

    async def run(self, path: str, sandbox_path: str, body: Any, op_id: str, command_seconds: float | None) -> ExecResult:
        """Post a command that carries `op_id` and wait for its result, over restarts of the server too.

        After a loss the record is asked for. Where the server, back again, says that it has none, the command never reached it, and the
        same id is posted again: an id runs once at most. OutcomeUnknown when the server does not come back or the sandbox went meanwhile.
        """
        limit = None if command_seconds is None else command_seconds + self.timeouts.exec_grace
        loop = asyncio.get_running_loop()
        until = None if limit is None else loop.time() + limit
        posted = False
        refused: Backoff | None = None
        lost: Backoff | None = None
        while True:
            left = None if until is None else max(until - loop.time(), 0.001)
            try:
                return await self.once("POST", path, ExecResult, body=body, timeout=left)
            except Overloaded:
                refused = refused or Backoff(self.timeouts.overloaded)
                if not await refused.pause():
                    raise
                continue
            except (NotFound, SandboxFailed) as error:
                if not posted:
                    raise
                raise OutcomeUnknown(
                    f"{op_id}: the sandbox went while the server was away: {error.message}", cause="sandbox-gone"
                ) from error
            except ConnectionFailed as error:
                lost = lost or Backoff(self.timeouts.reconnect)
                if error.ran == "not-run":
                    if not await lost.pause():
                        raise (OutcomeUnknown(f"{op_id}: {error.message}", cause="connect") if posted else error) from error
                    continue
                posted = True
                if error.cause == "timeout":
                    raise OutcomeUnknown(f"{op_id}: no result in {limit:.1f} s", cause="timeout", details={"op_id": op_id}) from error
            try:
                return await self.recorded(sandbox_path, op_id, until)
            except NotFound:
                continue

    async def recorded(self, sandbox_path: str, op_id: str, until: float | None) -> ExecResult:
        """The result under `op_id`, waited for until the loop's time `until`. NotFound where the server has no such operation."""
        loop = asyncio.get_running_loop()
        lost: Backoff | None = None
        while True:
            left = RESULT_WAIT_SECONDS if until is None else min(RESULT_WAIT_SECONDS, until - loop.time())
            if left <= 0:
                raise OutcomeUnknown(f"{op_id}: no result in time; it still runs", cause="timeout", details={"op_id": op_id})
            try:
                return await self.once(
                    "GET",
                    f"{sandbox_path}/processes/{segment(op_id)}/result",
                    ExecResult,
                    query={"wait": round(left, 3)},
                    timeout=left + self.timeouts.request,
                )
            except Conflict as error:
                if error.cause != "running":
                    raise
                lost = None
            except ConnectionFailed as error:
                lost = lost or Backoff(self.timeouts.reconnect)
                if not await lost.pause():
                    raise OutcomeUnknown(f"{op_id}: {error.message}", cause=error.cause, details={"op_id": op_id}) from error

    async def download(self, path: str, query: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> AsyncGenerator[bytes, None]:
        """The body of a GET, piece by piece."""
        async with self.transport.stream("GET", with_query(path, query), headers=headers) as reply:
            if reply.status >= 400:
                raise decode_error(reply.status, await reply.read(), reply.headers.get("Content-Type", ""))
            async for chunk in reply.chunks():
                yield chunk


def merged(parts: Iterable[bytes]) -> bytes:
    """The pieces of a body as one."""
    pieces = list(parts)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
