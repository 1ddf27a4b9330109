"""The shortcut and the ordinary routes, asked with the same bytes on a bare socket, with and without a query that nobody reads."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from polling import until

CREATE = msgspec.json.encode({"args": {"container_image": "debian"}})


async def ask(served, data):
    """Status, header names (lower case) with values, body."""
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    try:
        writer.write(data)
        while True:
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode()
            status = int(head.split(" ")[1])
            if status >= 200:
                break
        headers = sorted(line.lower() for line in head.split("\r\n")[1:] if line)
        length = next(int(line.split(":")[1]) for line in headers if line.startswith("content-length"))
        return status, headers, await asyncio.wait_for(reader.readexactly(length), 5)
    finally:
        writer.close()


def request(method, path, headers, body=b"", *, chunked=False):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
        pieces = [body[start : start + 5] for start in range(0, len(body), 5)]
        data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
        data = body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


async def both(served, short, method, path, headers, body=b"", **options):
    before = len(short)
    first = await ask(served, request(method, path, headers, body, **options))
    took = len(short) - before
    assert took == 1 or any(len(each) > 128 for each in headers)  # a long key goes the ordinary way
    second = await ask(served, request(method, path + "?ordinary=1", headers, body, **options))
    assert len(short) == before + took
    return first, second


async def made(served):
    _, _, body = await ask(served, request("POST", "/v1/sandboxes", [], CREATE))
    return msgspec.json.decode(body)["sandboxes"][0]["sandbox_id"]


@pytest.mark.parametrize(
    "headers",
    [
        ["Content-Type: application/json", "Content-Type: text/plain"],
        ["Content-Type: text/plain", "Content-Type: application/json"],
        ["Content-Type: application/json, text/plain"],
        ["Content-Type: APPLICATION/JSON; charset=utf-8"],
        ["CONTENT-TYPE: application/json"],
        [],
        ["Accept: text/html", "Accept: application/vnd.msgpack"],
        ["Accept: application/vnd.msgpack;q=0.1, application/json"],
    ],
)
async def test_content_types(served, short, headers):
    sandbox = await made(served)
    body = b'{"argv": 5}'
    first, second = await both(served, short, "POST", f"/v1/sandboxes/{sandbox}/exec", headers, body)
    assert first == second


@pytest.mark.parametrize(
    "headers",
    [
        ["Idempotency-Key: first", "Idempotency-Key: second"],
        ["Idempotency-Key: k\xe4se"],
        ["Idempotency-Key:"],
        ["Idempotency-Key:   spaced   "],
        ["Idempotency-Key: " + "k" * 128],
        ["IDEMPOTENCY-KEY: upper"],
        ["Idempotency-Key: " + "k" * 200, "Idempotency-Key: short"],
        ["Idempotency-Key: 007"],
        ["Idempotency-Key: null"],
    ],
)
async def test_idempotency_keys(served, short, headers, monkeypatch):
    keys = []
    create = served.edge.create

    async def noting(request, key=None):
        keys.append(key)
        return await create(request, key)

    monkeypatch.setattr(served.edge, "create", noting)
    first, second = await both(served, short, "POST", "/v1/sandboxes", headers, CREATE)
    assert (first[0], len(keys)) == (second[0], 2 if second[0] == 201 else len(keys))
    assert keys[:1] == keys[-1:]


async def test_a_key_too_long_is_refused_or_not_wherever_it_stands(served, short):
    headers = ["Idempotency-Key: short", "Idempotency-Key: " + "k" * 200]
    usual, _, _ = await ask(served, request("POST", "/v1/sandboxes?ordinary=1", headers, CREATE))
    status, _, _ = await ask(served, request("POST", "/v1/sandboxes", headers, CREATE))
    assert status == usual


async def test_paths_that_are_percent_encoded(served, short):
    sandbox = await made(served)
    encoded = sandbox.replace("s", "%73")
    first, second = await both(served, short, "POST", f"/v1/sandboxes/{encoded}/exec", [], b'{"shell": "exit 3"}')
    assert first[0] == second[0] == 200
    first, second = await both(served, short, "POST", f"/v1/sandboxes/{sandbox}/%65xec", [], b'{"shell": "exit 3"}')
    assert first[0] == second[0] == 200


@pytest.mark.parametrize("suffix", ["%0A", "%00", "%2Fexec", "/exec/", "//exec", "/exec%20", "/EXEC", "%3Fa=b", "/../exec", "/./exec"])
@pytest.mark.parametrize("method", ["POST", "DELETE", "GET", "PATCH"])
async def test_other_paths_do_not_take_the_shortcut_and_are_answered_alike(served, short, method, suffix):
    sandbox = await made(served)
    before = len(short)
    first = await ask(served, request(method, f"/v1/sandboxes/{sandbox}{suffix}", [], b"{}"))
    took = len(short) - before
    if suffix == "%2Fexec" and method == "POST":  # a path is decoded before it is looked at, by Litestar too
        assert took == 1
        assert first == await ask(served, request(method, f"/v1/sandboxes/{sandbox}{suffix}?ordinary=1", [], b"{}"))
    else:
        assert took == 0


async def test_bodies_in_chunks(served, short):
    sandbox = await made(served)
    body = b'{"shell": "exit 3"}'
    first, second = await both(served, short, "POST", f"/v1/sandboxes/{sandbox}/exec", [], body, chunked=True)
    assert [msgspec.json.decode(each[2])["exit_code"] for each in (first, second)] == [3, 3]
    first, second = await both(served, short, "DELETE", f"/v1/sandboxes/{sandbox}", [], b"what a body", chunked=True)
    assert first[0] == second[0] == 200


async def test_expect_100_continue(served, short):
    sandbox = await made(served)
    for query in ("", "?ordinary=1"):
        reader, writer = await asyncio.open_unix_connection(str(served.path))
        body = b'{"shell": "exit 3"}'
        writer.write(
            f"POST /v1/sandboxes/{sandbox}/exec{query} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n".encode()
            + b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)).startswith(b"HTTP/1.1 100 ")
        writer.write(body)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_failure_that_nobody_foresaw(served, short, monkeypatch):
    async def broken(*args):
        raise ZeroDivisionError

    for name in ("exec", "create", "stop"):
        monkeypatch.setattr(served.edge, name, broken)
    for method, path, body in (
        ("POST", "/v1/sandboxes/sb-1/exec", b'{"shell": "true"}'),
        ("POST", "/v1/sandboxes", CREATE),
        ("DELETE", "/v1/sandboxes/sb-1", b""),
    ):
        first, second = await both(served, short, method, path, [], body)
        assert first == second
        assert first[0] == 500


async def test_an_answer_that_cannot_be_encoded(served, short, monkeypatch):
    async def odd(*args):
        return {"x": object()}

    monkeypatch.setattr(served.edge, "stop", odd)
    first, second = await both(served, short, "DELETE", "/v1/sandboxes/sb-1", [])
    assert first == second


@pytest.mark.parametrize("query", ["", "?ordinary=1"])
@pytest.mark.parametrize("what", ["create", "exec", "stop"])
async def test_a_client_that_leaves_is_noticed_and_counted(served, what, query, monkeypatch):
    cancelled = []

    async def hanging(*args):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(what)
            raise

    monkeypatch.setattr(served.edge, what, hanging)
    method, path, body = {
        "create": ("POST", "/v1/sandboxes", CREATE),
        "exec": ("POST", "/v1/sandboxes/sb-1/exec", b'{"shell": "true"}'),
        "stop": ("DELETE", "/v1/sandboxes/sb-1", b""),
    }[what]
    _, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(request(method, path + query, [], body))
    await asyncio.sleep(0.1)
    writer.close()
    await until(lambda: cancelled == [what])
    await asyncio.sleep(0.02)
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    template = {"create": "/v1/sandboxes", "exec": "/v1/sandboxes/{sandbox_id}/exec", "stop": "/v1/sandboxes/{sandbox_id}"}[what]
    assert re.search(rf'dsec_request_seconds_count\{{method="{method}",route="{re.escape(template)}",status="499"\}} 1\.0', text)
    assert "dsec_creates_total" not in re.sub(r"^#.*$", "", text, flags=re.M)
    assert "dsec_execs_total" not in re.sub(r"^#.*$", "", text, flags=re.M)


@pytest.mark.parametrize("query", ["", "?ordinary=1"])
async def test_a_client_that_leaves_in_the_middle_of_its_body_starts_nothing(served, query):
    sandbox = await made(served)
    _, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(f"POST /v1/sandboxes/{sandbox}/exec{query} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    await asyncio.sleep(0.1)
    writer.close()
    await asyncio.sleep(0.05)
    assert served.edge.runs == 0


async def test_an_early_refusal_leaves_the_connection_in_order(served, short):
    """Headers that are refused before the body is read: what of the body comes later is not taken for the next request."""
    for query in ("", "?ordinary=1"):
        reader, writer = await asyncio.open_unix_connection(str(served.path))
        size = 66 << 20
        writer.write(f"POST /v1/sandboxes/sb-1/exec{query} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
        assert head.startswith(b"HTTP/1.1 413")
        await reader.readuntil(b"}}")
        piece = b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n".ljust(1 << 20, b" ")
        for _ in range(66):
            writer.write(piece)
            await writer.drain()
        writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200")
        writer.close()
