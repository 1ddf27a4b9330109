"""The server itself: negotiation, refusals, limits, authentication, what it tells of itself."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket

import aiohttp
import msgspec
import pytest
import structlog
from edge_double import EdgeDouble
from polling import until

from dsec.apiserver import ApiServer
from dsec.apiserver.logs import configure_logging
from libdsec import Conflict, Denied, DSecClient, DSecContainerRunArgs, InvalidArgument

MESSAGEPACK = "application/vnd.msgpack"


async def error_of(answer):
    return (await answer.json())["error"]


async def test_json_and_messagepack_say_the_same(http):
    request = {"args": {"container_image": "debian"}, "count": 2}
    async with http.post("/v1/sandboxes", json=request) as answer:
        assert answer.status == 201
        made = await answer.json()
        assert len(made["sandboxes"]) == 2
    path = f"/v1/sandboxes/{made['sandboxes'][0]['sandbox_id']}/exec"
    async with http.post(path, json={"argv": ["printf", "\\377"]}) as answer:
        assert (await answer.json())["stdout"] == "/w=="
    body = msgspec.msgpack.encode({"shell": "cat", "stdin": b"\xff\0"})
    async with http.post(path, data=body, headers={"Content-Type": MESSAGEPACK, "Accept": MESSAGEPACK}) as answer:
        assert answer.headers["content-type"] == MESSAGEPACK
        assert msgspec.msgpack.decode(await answer.read())["stdout"] == b"\xff\0"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"args": {"memory_limit_mb": "much"}}, "args.memory_limit_mb"),
        ({"args": {"memory_limit": 5}}, "args.memory_limit"),
        ({"args": {"env": {"A": 1}}}, "args.env[...]"),
        ({"args": {}, "count": 0}, "count"),
        ({"args": {}, "colour": "red"}, "colour"),
        ({"count": 1}, "args"),
        ([], "body"),
    ],
)
async def test_a_wrong_field_is_named(http, body, field):
    for data, kind in ((json.dumps(body), "application/json"), (msgspec.msgpack.encode(body), MESSAGEPACK)):
        async with http.post("/v1/sandboxes", data=data, headers={"Content-Type": kind}) as answer:
            error = await error_of(answer)
            assert (answer.status, error["code"], error["field"], error["ran"]) == (400, "invalid_argument", field, "not-run")


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"", b"nul\0"])
async def test_garbage_is_refused(http, body):
    async with http.post("/v1/sandboxes", data=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 400
        assert (await error_of(answer))["code"] == "invalid_argument"
    async with http.post("/v1/sandboxes", data=body, headers={"Content-Type": "text/html"}) as answer:
        assert answer.status == 400


async def test_routes_methods_and_queries_that_are_not(http, served):
    async with http.get("/v1/nothing") as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (404, "not_found")
    async with http.put("/v1/node") as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (405, "invalid_argument")
    async with http.get("/v1/sandboxes?state=asleep") as answer:
        assert (answer.status, (await error_of(answer))["field"]) == (400, "state")
    async with http.get("/v1/sandboxes?label=novalue") as answer:
        assert (answer.status, (await error_of(answer))["field"]) == (400, "label")
    async with http.get("/v1/sandboxes/x/processes/y/result?wait=-1") as answer:
        assert (answer.status, (await error_of(answer))["field"]) == (400, "wait")


async def test_a_body_of_100_mb_is_refused_before_it_is_sent(served):
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 104857600\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 413 ")
    body = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
    assert json.loads(body)["error"]["code"] == "quota_exceeded"
    writer.close()


@pytest.mark.slow
async def test_a_body_without_a_length_is_not_kept_past_the_limit(http):
    async def endless():
        for _ in range(100):
            yield b" " * (1 << 20)

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    async with http.post("/v1/sandboxes", data=endless(), headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 413
    assert resident() - before < 120 << 20


async def test_a_client_that_leaves_cancels_its_create(served, http):
    served.edge.create_gate = asyncio.Event()
    with pytest.raises(TimeoutError):
        await http.post("/v1/sandboxes", json={"args": {"container_image": "debian"}}, timeout=aiohttp.ClientTimeout(total=0.2))
    await until(lambda: served.edge.creates_cancelled == 1)
    assert served.edge.sandboxes == {}


async def test_a_client_that_leaves_does_not_end_its_command(served, http):
    async with DSecClient(served.url) as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian"))
        with pytest.raises(TimeoutError):
            await http.post(
                f"/v1/sandboxes/{sandbox.sandbox_id}/exec",
                json={"shell": "sleep 0.3; echo done", "op_id": "left"},
                timeout=aiohttp.ClientTimeout(total=0.15),
            )
        await until(lambda: served.edge.execs_abandoned == 1)
        assert (await sandbox.result("left", wait=5)).stdout == b"done\n"


async def test_tcp_needs_the_token(tmp_path):
    with pytest.raises(InvalidArgument) as caught:
        ApiServer(EdgeDouble(), tmp_path / "s", "127.0.0.1:0")
    assert caught.value.field == "token"
    async with ApiServer(EdgeDouble(), None, "127.0.0.1:0", "right") as server:
        url = f"http://127.0.0.1:{server.tcp_port}"
        async with DSecClient(url, "right") as client:
            sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian"))
            assert (await sandbox.run_shell("echo hi")).stdout == b"hi\n"
            process = await sandbox.start(["true"])
            assert [piece async for piece in process.output()] == []
            await process.aclose()
        for token in ("wrong", "rightt", None):
            with pytest.raises(Denied) as denied:
                async with DSecClient(url, token):
                    pass
            assert denied.value.ran == "not-run"
        async with aiohttp.ClientSession(url) as session:
            async with session.get("/v1/health") as answer:
                assert await answer.json() == {"status": "ok"}
            async with session.get("/v1/node") as answer:
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            for given, status in (("bearer right", 200), ("BEARER right", 200), ("Basic right", 401), ("right", 401), ("bearer", 401)):
                async with session.get("/v1/node", headers={"Authorization": given}) as answer:
                    assert answer.status == status
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"/v1/sandboxes/{sandbox.sandbox_id}/processes/x/stream")


async def test_a_dead_servers_socket_is_replaced_and_a_live_ones_not(tmp_path):
    path = tmp_path / "s.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    async with ApiServer(EdgeDouble(), path):
        with pytest.raises(Conflict) as caught:
            await ApiServer(EdgeDouble(), path).start()
        assert caught.value.cause == "in-use"
        async with DSecClient(f"unix://{path}"):
            pass
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(Conflict):
        await ApiServer(EdgeDouble(), path).start()
    assert path.read_text() == "precious"
    with pytest.raises(InvalidArgument):
        await ApiServer(EdgeDouble(), tmp_path / ("x" * 120)).start()


async def test_closing_ends_waiting_requests_in_bounded_time(tmp_path):
    edge = EdgeDouble()
    server = ApiServer(edge, tmp_path / "s", grace_seconds=0.1)
    await server.start()
    async with DSecClient(f"unix://{tmp_path}/s") as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian"))
        running = asyncio.ensure_future(sandbox.exec(["sleep", "60"]))
        await until(lambda: edge.runs == 1)
        async with asyncio.timeout(3):
            await server.aclose()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await edge.aclose()


async def test_metrics_count_by_route(served, http):
    async with DSecClient(served.url) as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian"))
        await sandbox.run_shell("true")
        async with await sandbox.start(["sleep", "50"]) as process, process.attach():
            async with http.get("/metrics") as answer:
                text = await answer.text()
    assert 'dsec_creates_total{outcome="made"} 1.0' in text
    assert 'dsec_execs_total{outcome="answered"} 1.0' in text
    assert 'dsec_request_seconds_count{method="POST",route="/v1/sandboxes/{sandbox_id}/exec",status="200"} 1.0' in text
    assert 'dsec_sandboxes{state="running"} 1.0' in text
    assert 'dsec_open_streams{route="/v1/sandboxes/{sandbox_id}/processes/{op_id}/stream"} 1.0' in text
    assert "dsec_edge_operations_started_total 2" in text
    assert sandbox.sandbox_id not in text
    open_fds = next(float(line.split()[1]) for line in text.splitlines() if line.startswith("dsec_open_fds "))
    assert 5 < open_fds < 1000


async def test_no_secret_is_logged(tmp_path):
    out = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    uvicorn_level = logging.getLogger("uvicorn.error").level
    try:
        configure_logging("debug", out)

        class Broken(EdgeDouble):
            async def exec(self, sandbox_id, request):
                secret_local = request.env["KEY"]
                raise ZeroDivisionError(len(secret_local))

        async with ApiServer(Broken(), None, "127.0.0.1:0", "token-secret") as server:
            async with DSecClient(f"http://127.0.0.1:{server.tcp_port}", "token-secret") as client:
                sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian", env={"A": "env-secret"}))
                with pytest.raises(Exception, match="its log says why") as caught:
                    await sandbox.run_shell("echo shell-secret", env={"KEY": "key-secret"})
                assert caught.value.ran == "unknown"
        structlog.get_logger("x").info("seen")
    finally:
        root.handlers, root.level = handlers, level
        logging.getLogger("uvicorn.error").setLevel(uvicorn_level)
        structlog.reset_defaults()
    text = out.getvalue()
    assert "ZeroDivisionError" in text
    assert "secret_local" in text  # the source line is there, its value is not
    for secret in ("token-secret", "env-secret", "shell-secret", "key-secret"):
        assert secret not in text
    assert all(json.loads(line) for line in text.splitlines())


async def test_environments_are_listed_shown_and_removed(served):
    async with DSecClient(served.url) as client:
        assert {each.name for each in await client.environments()} == {"debian", "alpine"}
        assert (await client.environment("debian")).kind == "base"
        await client.remove_environment("alpine")
        assert [each.name for each in await client.environments()] == ["debian"]
        assert (await client.node()).edge == "double"
