"""The OpenAPI document: what Litestar reads off the routes, with what it cannot see there.

That is our error body with its statuses, the bearer token, bodies that are bytes, MessagePack beside JSON, and, in words, since OpenAPI has
no place for them, the WebSocket routes. All of it is made of the program's own tables, in their order, so the document of two starts is the
same to the byte.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from inspect import cleandoc
from typing import Any, Final

from litestar import Litestar, Request
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from litestar.routes import WebSocketRoute

from dsec.apiserver.wire import JSON, MESSAGEPACK
from libdsec import errors
from libdsec.errors import CommandFailed, DSecError

__all__ = ["DESCRIPTION", "OCTETS", "TAR", "BytesIn", "Document", "Proxied", "TarIn", "bytes_out", "document_of"]

DESCRIPTION: Final = f"""\
Bodies are JSON (bytes in base64) or, by Content-Type and Accept, MessagePack ({MESSAGEPACK}, bytes as they are). Files and tar streams are
bytes as they are. Over TCP every request but `GET /v1/health` carries `Authorization: Bearer TOKEN`; the Unix socket needs no token."""

_SOCKETS: Final = """\


WebSocket routes. Messages are binary. A route that ends in good order closes with 1000; one that fails, with 4000 + the HTTP status of its
error and `code: message` as the reason; without a valid token the handshake is refused.
"""

OCTETS: Final = "application/octet-stream"
TAR: Final = "application/x-tar"
_ANY: Final = "*/*"
_BYTES: Final = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
_TOKEN: Final = "token"
_OPEN: Final = "/v1/health"
_METHODS: Final = ("get", "put", "post", "delete", "head", "patch")


def bytes_out(media_type: str, description: str) -> ResponseSpec:
    """What a route declares of an answer that is bytes."""
    return ResponseSpec(data_container=bytes, media_type=media_type, description=description, generate_examples=False)


def _bytes_in(media_type: str, *, required: bool) -> RequestBody:
    content = {media_type: OpenAPIMediaType(schema=_BYTES)}
    return RequestBody(content=content, required=required)


@dataclass
class BytesIn(Operation):
    """Of a route whose body is streamed: Litestar knows bodies only as a handler's `data`."""

    def __post_init__(self) -> None:
        self.request_body = _bytes_in(OCTETS, required=True)


@dataclass
class TarIn(Operation):
    """Of a route whose body is a tar stream."""

    def __post_init__(self) -> None:
        self.request_body = _bytes_in(TAR, required=True)


@dataclass
class Proxied(Operation):
    """Of a route where the sandbox's own server answers, with whatever status and body."""

    def __post_init__(self) -> None:
        self.request_body = _bytes_in(_ANY, required=False)
        content = {_ANY: OpenAPIMediaType(schema=_BYTES)}
        text = "What the server in the sandbox answered, of whatever status. An error of DSec's own has the header `X-DSec-Error`."
        self.responses = {"default": OpenAPIResponse(description=text, content=content)}


class Document(JsonRenderPlugin):
    """Serves the whole document."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return self.render_json(request, document_of(request.app))


def document_of(app: Litestar) -> dict[str, Any]:
    """The whole document of an application."""
    document: dict[str, Any] = copy.deepcopy(app.openapi_schema.to_schema())
    document["info"]["description"] += _SOCKETS + "".join(_socket_lines(app))
    components = document["components"]
    components["schemas"]["Error"] = _ERROR
    components["responses"] = {_name(status): _response(kinds) for status, kinds in _kinds_by_status().items()}
    components["securitySchemes"] = {
        _TOKEN: {"type": "http", "scheme": "bearer", "description": "Of the TCP listener. The Unix socket needs none."}
    }
    document["security"] = [{_TOKEN: []}, {}]
    # Of a handler with several paths Litestar makes a set.
    document["paths"] = dict(sorted(document["paths"].items()))
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                _complete(path, method, item[method])
    return document


def _socket_lines(app: Litestar) -> Iterator[str]:
    for route in sorted(app.routes, key=lambda route: route.path_format):
        if isinstance(route, WebSocketRoute):
            told = cleandoc(route.route_handler.fn.__doc__ or "").replace("\n", " ")
            yield f"\n- `{route.path_format}`: {told}"


# -- errors ------------------------------------------------------------------------------------------------------------------------------

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "allOf": [
                {"$ref": "#/components/schemas/ErrorBody"},
                {
                    "type": "object",
                    "properties": {"details": {"type": "object", "description": "What else is known, by the error's cause."}},
                },
            ]
        }
    },
    "description": "`ran` is not-run, ran or unknown; `field` names the offending argument, `cause` is for machines.",
}


def _kinds_by_status() -> dict[int, list[type[DSecError]]]:
    """The server's errors by the status that they have on the wire; a missing token is `denied` with one of its own."""
    found: dict[int, list[type[DSecError]]] = {HTTPStatus.UNAUTHORIZED: [errors.Denied]}
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, DSecError) and kind is not CommandFailed:
            found.setdefault(kind.http_status, []).append(kind)
    return dict(sorted(found.items()))


def _name(status: int) -> str:
    return f"Error{int(status)}"


def _response(kinds: list[type[DSecError]]) -> dict[str, Any]:
    return {
        "description": " ".join(f"`{kind.code}`: {cleandoc(kind.__doc__ or '').splitlines()[0]}" for kind in kinds),
        "content": _both({"$ref": "#/components/schemas/Error"}),
    }


# -- operations --------------------------------------------------------------------------------------------------------------------------


def _both(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}, MESSAGEPACK: {"schema": schema}}


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    if method in ("get", "head", "delete") and operation.get("requestBody", {}).get("required") is False:
        del operation["requestBody"]
    for part in (operation.get("requestBody", {}), *operation["responses"].values()):
        part["content"] = _contents(part.get("content", {}))
        if not part["content"] or method == "head":
            del part["content"]
    # Litestar tells of a refusal by its own body, where it sees that there can be one.
    for status in _kinds_by_status():
        operation["responses"][str(int(status))] = {"$ref": f"#/components/responses/{_name(status)}"}
    if path == _OPEN:
        operation["security"] = []
        del operation["responses"][str(int(HTTPStatus.UNAUTHORIZED))]


def _contents(content: dict[str, Any]) -> dict[str, Any]:
    if JSON in content:
        return _both(content[JSON]["schema"])
    return {kind: {"schema": _BYTES.to_schema()} if kind in (OCTETS, TAR) else one for kind, one in content.items()}
