"""The shortcut for the hot requests answers as the ordinary routes do: a query that nobody reads takes the ordinary way."""

from __future__ import annotations

import re

import msgspec
import pytest

from libdsec import DSecClient, DSecContainerRunArgs

MESSAGEPACK = "application/vnd.msgpack"
EXEC = {"argv": ["sh", "-c", "echo out; echo err >&2; exit 3"], "op_id": "op-1"}


@pytest.fixture
async def sandbox(served):
    async with DSecClient(served.url) as client, await client.run_container(DSecContainerRunArgs(container_image="debian")) as made:
        yield made


async def both(http, ordinary, method, path, **options):
    """Status, headers and body of the same request by the shortcut and by the ordinary way."""
    answers = []
    for query, ways in (("", 0), ("?ordinary=1", 1)):
        before = len(ordinary)
        async with http.request(method, f"{path}{query}", **options) as answer:
            body = await answer.read()
            headers = {name.lower(): value for name, value in answer.headers.items()}
            answers.append((answer.status, headers, body))
        assert len(ordinary) - before == ways
    return answers


@pytest.mark.parametrize("accept", [MESSAGEPACK, "application/json", ""])
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"argv": 7}',
        b'{"argv": ["true"], "surprise": 1}',
    ],
)
async def test_a_bad_command_is_refused_alike(sandbox, http, ordinary, body, accept):
    headers = {"Content-Type": "application/json", **({"Accept": accept} if accept else {})}
    short, usual = await both(http, ordinary, "POST", f"/v1/sandboxes/{sandbox.sandbox_id}/exec", data=body, headers=headers)
    assert short == usual
    assert short[0] >= 400
    assert short[1]["x-dsec-error"]


async def test_no_body_at_all_is_refused_alike(sandbox, http, ordinary):
    errors = []
    for status, _, body in await both(
        http, ordinary, "POST", f"/v1/sandboxes/{sandbox.sandbox_id}/exec", data=b"", headers={"Content-Type": "application/json"}
    ):
        error = msgspec.json.decode(body)["error"]
        errors.append((status, error["code"], error["field"]))
    assert errors == [(400, "invalid_argument", "body")] * 2


async def test_an_unknown_content_type_and_an_unknown_sandbox_are_refused_alike(sandbox, http, ordinary):
    path = f"/v1/sandboxes/{sandbox.sandbox_id}/exec"
    short, usual = await both(http, ordinary, "POST", path, data=b"x", headers={"Content-Type": "text/plain"})
    assert short == usual
    body = msgspec.json.encode(EXEC)
    short, usual = await both(http, ordinary, "POST", "/v1/sandboxes/sb-none/exec", data=body, headers={"Content-Type": "application/json"})
    assert short == usual
    assert short[0] == 404


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read_alike(sandbox, http, ordinary):
    async def endless():
        while True:
            yield b"x" * 65536

    headers = {"Content-Length": str(100 << 20), "Content-Type": MESSAGEPACK}
    answers = []
    for query in ("", "?ordinary=1"):
        path = f"/v1/sandboxes/{sandbox.sandbox_id}/exec{query}"
        async with http.post(path, data=endless(), headers=headers) as answer:
            answers.append((answer.status, await answer.json()))
    assert answers[0] == answers[1]
    assert answers[0][1]["error"]["field"] == "body"


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_a_command_is_answered_alike(sandbox, http, ordinary, encoding):
    codec, kind = (msgspec.json, "application/json") if encoding == "json" else (msgspec.msgpack, MESSAGEPACK)
    headers = {"Content-Type": kind, "Accept": kind}
    answers = await both(
        http, ordinary, "POST", f"/v1/sandboxes/{sandbox.sandbox_id}/exec", data=codec.encode({"shell": "exit 3"}), headers=headers
    )
    for status, got, body in answers:
        assert (status, got["content-type"], codec.decode(body)["exit_code"]) == (200, kind, 3)
    assert answers[0][1].keys() == answers[1][1].keys()


async def test_a_creation_and_a_stop_are_answered_alike(served, http, ordinary):
    request = msgspec.json.encode({"args": {"container_image": "debian"}, "backend": "container"})
    headers = {"Content-Type": "application/json"}
    made = await both(http, ordinary, "POST", "/v1/sandboxes", data=request, headers=headers)
    assert [status for status, _, _ in made] == [201, 201]
    ids = [msgspec.json.decode(body)["sandboxes"][0]["sandbox_id"] for _, _, body in made]
    assert len(set(ids)) == 2
    for sandbox_id in ids:
        stopped = await both(http, ordinary, "DELETE", f"/v1/sandboxes/{sandbox_id}")
        assert [(status, msgspec.json.decode(body)["state"]) for status, _, body in stopped] == [(200, "stopped")] * 2


async def test_one_idempotency_key_is_one_creation_by_both_ways(served, http, ordinary):
    request = msgspec.json.encode({"args": {"container_image": "debian"}, "backend": "container"})
    headers = {"Content-Type": "application/json", "Idempotency-Key": "same"}
    short, usual = await both(http, ordinary, "POST", "/v1/sandboxes", data=request, headers=headers)
    assert msgspec.json.decode(short[2])["sandboxes"][0]["sandbox_id"] == msgspec.json.decode(usual[2])["sandboxes"][0]["sandbox_id"]
    long = {"Content-Type": "application/json", "Idempotency-Key": "k" * 200}
    async with http.post("/v1/sandboxes", data=request, headers=long) as answer:
        assert (answer.status, (await answer.json())["error"]["field"].lower()) == (400, "idempotency-key")


async def test_both_ways_count_under_one_route(sandbox, http, ordinary):
    await both(http, ordinary, "POST", f"/v1/sandboxes/{sandbox.sandbox_id}/exec", json={"shell": "true"})
    async with http.get("/metrics") as answer:
        text = await answer.text()
    routes = set(re.findall(r'dsec_request_seconds_count\{method="POST",route="([^"]*exec)"', text))
    assert routes == {"/v1/sandboxes/{sandbox_id}/exec"}
    assert re.search(r'dsec_execs_total\{outcome="answered"\} 2\.0', text)


@pytest.mark.parametrize("path", ["/v1/sandboxes/", "/v1/sandboxes/a%2Fb/exec", "/v1/sandboxes/ä/exec", "/v1/sandboxes/x/exec/"])
async def test_other_paths_take_the_ordinary_way(served, http, ordinary, path):
    async with http.post(f"{path}", data=b"{}") as answer:
        assert answer.status >= 400
    assert len(ordinary) == 1
