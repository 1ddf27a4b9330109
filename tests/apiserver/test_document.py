"""The OpenAPI document says what the server does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from edge_double import EdgeDouble

from dsec.apiserver.app import create_litestar
from dsec.apiserver.document import document_of
from libdsec import errors, schema
from libdsec.errors import CommandFailed, DSecError

METHODS = {"get", "put", "post", "delete", "head", "patch"}
FILES = "/v1/sandboxes/{sandbox_id}/files"
STATUSES = {
    str(kind.http_status)
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DSecError) and kind is not CommandFailed
}


@pytest.fixture(scope="module")
def document():
    return msgspec.json.decode(msgspec.json.encode(document_of(create_litestar(EdgeDouble()))))


@pytest.fixture
def operations(document):
    return {(method, path): each for path, item in document["paths"].items() for method, each in item.items() if method in METHODS}


def test_the_document_has_every_route(document, operations):
    assert document["openapi"].startswith("3.1")
    for wanted in (
        ("post", "/v1/sandboxes"),
        ("patch", "/v1/sandboxes/{sandbox_id}"),
        ("post", "/v1/sandboxes/{sandbox_id}/exec"),
        ("get", "/v1/sandboxes/{sandbox_id}/processes/{op_id}/result"),
        ("put", FILES),
        ("get", FILES + "/tree"),
        ("delete", "/v1/environments/{name}"),
        ("get", "/metrics"),
    ):
        assert wanted in operations
    schemas = document["components"]["schemas"]
    for name in ("CreateRequest", "ExecRequest", "ErrorBody"):
        assert set(schemas[name]["properties"]) == set(getattr(schema, name).__struct_fields__)
    identities = [each["operationId"] for each in operations.values()]
    assert len(identities) == len(set(identities))
    assert all(each["description"] for each in operations.values())


def test_every_reference_leads_somewhere(document):
    for reference in msgspec.json.encode(document).decode().split('"$ref":"#/')[1:]:
        place = document
        for part in reference.split('"')[0].split("/"):
            place = place[part]


def test_every_operation_has_the_statuses_of_the_error_tree_with_our_body(document, operations):
    for (method, path), operation in operations.items():
        wanted = STATUSES if path == "/v1/health" else STATUSES | {"401"}
        refused = {status: each for status, each in operation["responses"].items() if status[0] in "45"}
        assert set(refused) == wanted, (method, path)
        for each in refused.values():
            answer = document["components"]["responses"][each["$ref"].rsplit("/", 1)[1]]
            assert answer["description"]
            for content in answer["content"].values():
                assert content == {"schema": {"$ref": "#/components/schemas/Error"}}
    error = document["components"]["schemas"]["Error"]["properties"]["error"]
    assert error["allOf"][0] == {"$ref": "#/components/schemas/ErrorBody"}


async def test_a_refusal_has_the_body_of_the_document(document, http):
    known = set(document["components"]["schemas"]["ErrorBody"]["properties"]) | {"details"}
    async with http.post("/v1/sandboxes", json={"args": {"colour": 1}}) as answer:
        assert answer.status == 400
        body = await answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) <= known


def test_every_operation_but_health_knows_of_the_token(document, operations):
    (scheme,) = document["components"]["securitySchemes"]
    assert document["components"]["securitySchemes"][scheme] | {"description": ""} == {
        "type": "http",
        "scheme": "bearer",
        "description": "",
    }
    # The Unix socket needs none.
    assert document["security"] == [{scheme: []}, {}]
    assert [path for (_, path), operation in operations.items() if operation.get("security") is not None] == ["/v1/health"]


@pytest.mark.parametrize(
    ("method", "path", "kind"), [("put", FILES, "application/octet-stream"), ("put", FILES + "/tree", "application/x-tar")]
)
def test_a_body_that_is_bytes_is_told(operations, method, path, kind):
    body = operations[method, path]["requestBody"]
    assert body == {"required": True, "content": {kind: {"schema": {"type": "string", "format": "binary"}}}}


def test_answers_that_are_bytes_are_told(operations):
    binary = {"schema": {"type": "string", "format": "binary"}}
    for status in ("200", "206"):
        assert operations["get", FILES]["responses"][status]["content"] == {"application/octet-stream": binary}
    assert operations["get", FILES + "/tree"]["responses"]["200"]["content"] == {"application/x-tar": binary}


def test_what_is_json_is_messagepack_too(operations):
    for operation in operations.values():
        for part in (operation.get("requestBody", {}), *operation["responses"].values()):
            content = part.get("content", {})
            assert content.get("application/json") == content.get("application/vnd.msgpack")


def test_the_answer_of_a_sandboxs_own_server_is_of_any_status(operations):
    proxied = {key: each for key, each in operations.items() if "/ports/" in key[1]}
    assert {method for method, _ in proxied} == METHODS
    for (method, _), operation in proxied.items():
        assert {status for status in operation["responses"] if status[0] not in "45"} == {"default"}
        assert ("requestBody" in operation) == (method in ("put", "post", "patch"))
        assert ("content" in operation["responses"]["default"]) == (method != "head")


def test_the_websocket_routes_are_told_in_words(document):
    text = document["info"]["description"]
    for path in ("/processes/{op_id}/stream", "/files/watch", "/ports/{port}"):
        assert f"/v1/sandboxes/{{sandbox_id}}{path}`" in text


def test_nothing_is_made_up(document):
    assert "examples" not in msgspec.json.encode(document).decode()


def test_two_starts_give_the_same_document():
    program = (
        "import sys, msgspec; from edge_double import EdgeDouble; from dsec.apiserver.app import create_litestar;"
        "from dsec.apiserver.document import document_of;"
        "sys.stdout.buffer.write(msgspec.json.encode(document_of(create_litestar(EdgeDouble()))))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]


async def test_the_document_is_served(document, http):
    async with http.get("/schema/openapi.json") as answer:
        assert answer.status == 200
        assert await answer.json(content_type=None) == document
    async with http.get("/schema") as answer:
        assert answer.status == 200
