"""Bodies in and out: MessagePack or JSON, straight to and from the schema's structs, with a size limit that holds before anything is kept.

Litestar decodes a body to dictionaries and converts those; here the bytes are decoded once, into the handler's own type, so that an error
carries the path of the field and a create of a thousand sandboxes costs one pass.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, NoReturn

import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.response import Response
from litestar.types import Receive, Scope, Send

from libdsec.errors import DSecError, InvalidArgument, QuotaExceeded

__all__ = [
    "JSON",
    "MAX_BODY_BYTES",
    "MESSAGEPACK",
    "Answer",
    "StreamAnswer",
    "WireRequest",
    "WireResponse",
    "answer_of",
    "body_pieces",
    "decode_body",
    "wants_messagepack",
    "whole_body",
]

MESSAGEPACK = "application/vnd.msgpack"
JSON = "application/json"
MAX_BODY_BYTES = 65 << 20
"""Of a JSON or MessagePack body: a command's standard input, which may have 64 MiB, and the rest.

Files are streamed and have no limit but the sandbox's disk.
"""

_MESSAGEPACK_NAMES = (b"application/vnd.msgpack", b"application/x-msgpack", b"application/msgpack")
_FIELD = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING_OR_UNKNOWN = re.compile(r"(?:missing required field|contains unknown field) `([^`]+)`")
_encode_messagepack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode
_decoders: dict[Any, tuple[msgspec.msgpack.Decoder[Any], msgspec.json.Decoder[Any]]] = {}


def wants_messagepack(scope: Scope) -> bool:
    """Whether the answer is to be MessagePack: only where Accept names it."""
    return any(name == b"accept" and value.startswith(_MESSAGEPACK_NAMES) for name, value in scope["headers"])


def decode_body(body: bytes, content_type: bytes, target: Any) -> Any:
    """One decode into `target`; what does not fit raises InvalidArgument with the field's path, e.g. `args.memory_limit_mb`."""
    decoders = _decoders.get(target)
    if decoders is None:
        decoders = _decoders[target] = (msgspec.msgpack.Decoder(target), msgspec.json.Decoder(target))
    kind = content_type.split(b";", 1)[0].strip().lower()
    try:
        if kind in _MESSAGEPACK_NAMES:
            return decoders[0].decode(body)
        if kind in (b"", b"application/json"):
            return decoders[1].decode(body)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not valid {kind.decode('latin-1') or JSON}: {error}", field="body") from None
    raise InvalidArgument(f"content-type {kind.decode('latin-1')!r} is not known; send {MESSAGEPACK} or {JSON}", field="content-type")


def _refuse(message: str) -> NoReturn:
    where = _FIELD.search(message)
    path = where.group(1) if where else ""
    named = _MISSING_OR_UNKNOWN.search(message)
    if named:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
    raise InvalidArgument(message, field=path or "body") from None


async def whole_body(headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
    """All of the body. QuotaExceeded as soon as its announced or received length passes the limit; the rest is read and dropped."""
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DSecError("the client went away before its request was complete", ran="not-run", cause="disconnected")
        if message["type"] != "http.request":
            continue
        piece = message["body"]
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class WireRequest(Request[Any, Any, State]):
    """A request whose typed body is decoded in one step and refused early when it is too large."""

    async def body(self) -> bytes:
        """See whole_body."""
        if isinstance(self._body, bytes):
            return self._body
        self._body = body = await whole_body(dict(self.scope["headers"]), self.receive)
        return body

    async def json(self) -> Any:
        """The body as the handler's `data` type, whatever its encoding. Litestar calls this for every handler with `data`."""
        field = self.route_handler.parsed_data_field
        target = field.annotation if field is not None else Any
        content_type = next((value for name, value in self.scope["headers"] if name == b"content-type"), b"")
        return decode_body(await self.body(), content_type, target)


def _too_large() -> QuotaExceeded:
    return QuotaExceeded(f"the body is larger than {MAX_BODY_BYTES} bytes", field="body", cause="body-size")


class Answer:
    """A complete response, encoded. Lighter than Litestar's own, which builds cookies and header objects that nobody here uses."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, media_type: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.status = status
        self.body = body
        self.headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
        if headers:
            self.headers += headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def answer_of(scope: Scope, status: int, content: Any, headers: list[tuple[bytes, bytes]] | None = None) -> Answer:
    """`content` in the encoding that the client asked for."""
    if wants_messagepack(scope):
        return Answer(status, _encode_messagepack(content), MESSAGEPACK.encode(), headers)
    return Answer(status, _encode_json(content), JSON.encode(), headers)


class StreamAnswer:
    """A response whose body comes piece by piece. Litestar takes it as it is, since it is an ASGI application.

    A failure before the first piece is answered as an error; after it the connection is broken, so that the body does not look complete.
    """

    __slots__ = ("headers", "length", "pieces", "status")

    def __init__(
        self,
        status: int,
        pieces: AsyncGenerator[bytes, None],
        *,
        length: int | None,
        headers: list[tuple[bytes, bytes]],
        media_type: bytes = b"application/octet-stream",
    ) -> None:
        self.status = status
        self.pieces = pieces
        self.length = length
        self.headers = [(b"content-type", media_type), *headers]
        if length is not None:
            self.headers.append((b"content-length", b"%d" % length))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.pieces) as pieces:
            first = await anext(pieces, b"")
            await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
            if first:
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def body_pieces(request: Request[Any, Any, Any]) -> AsyncIterator[bytes]:
    """The body as it arrives, unlimited. Raises where the client goes away before its end."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise DSecError("the client went away before its request was complete", ran="not-run", cause="disconnected")
        if message["type"] != "http.request":
            continue
        if message["body"]:
            yield message["body"]
        if not message.get("more_body", False):
            return


class WireResponse(Response[Any]):
    """Encodes what a handler returned as the client asked for it."""

    def to_asgi_response(self, app: Any, request: Request[Any, Any, Any], **options: Any) -> Any:
        status = self.status_code or options.get("status_code") or 200
        extra = (
            [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()] if self.headers else None
        )
        if status == 204:
            return Answer(status, b"", JSON.encode(), extra)
        if isinstance(self.content, bytes):
            # Rendered already: the OpenAPI document.
            return Answer(status, self.content, str(self.media_type or options.get("media_type") or JSON).encode(), extra)
        return answer_of(request.scope, status, self.content, extra)
