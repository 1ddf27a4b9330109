"""Ports: a raw tunnel and HTTP to real servers on this machine's loopback, which the double takes for the sandbox's."""

from __future__ import annotations

import asyncio
import os

import pytest
from aiohttp import web

from libdsec import DSecClient, DSecContainerRunArgs, InvalidArgument, NotFound


@pytest.fixture
async def sandbox(served):
    async with DSecClient(served.url) as client:
        yield await client.run_container(DSecContainerRunArgs(container_image="debian"))


@pytest.fixture
async def echo_port():
    """A server that sends everything back once it has seen the end, then a last word."""

    async def talk(reader, writer):
        data = await reader.read()
        writer.write(data + b"|end")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


@pytest.fixture
async def web_port():
    async def show(request):
        body = await request.read()
        return web.json_response(
            {
                "method": request.method,
                "path": request.raw_path,
                "body": body.decode(),
                "authorization": request.headers.get("Authorization"),
                "host": request.host,
            },
            status=418,
            headers={"X-DSec-Error": "forged"},
        )

    async def big(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(50):
            await answer.write(b"x" * 100_000)
        return answer

    async def cut(request):
        answer = web.StreamResponse(headers={"Content-Length": "100"})
        await answer.prepare(request)
        await answer.write(b"half")
        request.transport.abort()
        return answer

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.get("/big", big), web.get("/cut", cut), web.route("*", "/{rest:.*}", show)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site._server.sockets[0].getsockname()[1]
    await runner.cleanup()


async def test_a_tunnel_carries_bytes_and_half_closes(sandbox, echo_port):
    data = os.urandom(2_000_000)
    async with sandbox.tcp(echo_port) as connection:
        await connection.write(data)
        await connection.write_eof()
        assert await connection.read_exactly(len(data)) == data
        assert await connection.read() == b"|end"
        assert await connection.read() == b""


async def test_a_closed_port_is_not_found(sandbox):
    async with sandbox.tcp(1) as connection:
        with pytest.raises(NotFound):
            await connection.read()
    with pytest.raises(NotFound):
        await sandbox.http(1).get("/")
    with pytest.raises(InvalidArgument) as caught:
        await sandbox.http(70_000).get("/")
    assert caught.value.field == "port"


async def test_http_goes_through_as_it_is(sandbox, web_port):
    http = sandbox.http(web_port)
    reply = await http.post("/a%2Fb/c?x=1", params={"y": "ü"}, json={"k": 1}, headers={"Authorization": "Basic guest"})
    assert reply.status == 418
    shown = reply.json()
    assert shown["method"] == "POST"
    assert shown["path"] == "/a%2Fb/c?x=1&y=%C3%BC"
    assert shown["body"] == '{"k":1}'
    assert shown["authorization"] == "Basic guest"
    assert (await http.get()).json()["path"] == "/"
    assert (await http.request("HEAD", "/h")).body == b""


async def test_bodies_are_streamed_both_ways(sandbox, web_port):
    async def pieces():
        for _ in range(20):
            yield b"y" * 50_000

    http = sandbox.http(web_port)
    assert len((await http.request("PUT", "/up", body=pieces())).json()["body"]) == 1_000_000
    assert len((await http.get("/big")).body) == 5_000_000
    assert sum([len(piece) async for piece in http.stream("GET", "/big")]) == 5_000_000


async def test_an_answer_that_is_cut_off_is_no_answer(sandbox, web_port):
    with pytest.raises(Exception, match="broke"):
        await sandbox.http(web_port).get("/cut")
