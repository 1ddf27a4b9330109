"""Small writes that go out together: flow control, order and endings, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tarfile
import time

import pytest
import uvloop
from edge_double import EdgeDouble

from dsec.apiserver import ApiServer
from dsec.apiserver.server import _Listener

# libuv's first loop makes a pipe that stays.
uvloop.new_event_loop().close()

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


def run(factory, main):
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


@contextlib.asynccontextmanager
async def listening(app, path):
    """Any ASGI application behind the server's own listener."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(16)
    listener.setblocking(False)
    made = _Listener(app, listener)
    await made.start()
    try:
        yield
    finally:
        await made.aclose(0.2)


@contextlib.asynccontextmanager
async def asked(path, request):
    """A client that has sent `request` and takes little of the answer."""
    reader, writer = await asyncio.open_unix_connection(str(path), limit=1024)
    writer.write(request)
    yield reader
    writer.transport.abort()
    await asyncio.sleep(0.05)


async def answer(send, body=b"ok"):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


# -- flow control


@pytest.mark.parametrize("factory", LOOPS)
def test_small_pieces_of_a_stream_wait_for_a_client_that_does_not_read(factory, tmp_path):
    """The application never has to wait for anything but the client: 80 MB in pieces of 8 KiB must not all be taken."""
    taken = 0

    async def app(scope, receive, send):
        nonlocal taken
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": bytes(8192), "more_body": True})
            taken += 8192
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def main():
        async with listening(app, tmp_path / "s"), asked(tmp_path / "s", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            await asyncio.sleep(0.3)
            return taken

    assert run(factory, main) < 4 << 20


@pytest.mark.slow
async def test_a_tree_of_many_links_waits_for_a_client_that_does_not_read(tmp_path, monkeypatch):
    """The same by a real route: what a guest made in its sandbox must not fill the server's memory or hold its loop."""
    root = tmp_path / "root"
    (root / "many").mkdir(parents=True)
    for index in range(20_000):
        os.symlink("x", root / "many" / f"l{index}")
    made = 0
    real = tarfile.TarInfo.tobuf

    def counting(self, *args, **kwargs):
        nonlocal made
        made += 1
        return real(self, *args, **kwargs)

    monkeypatch.setattr(tarfile.TarInfo, "tobuf", counting)
    edge = EdgeDouble(root)
    async with ApiServer(edge, tmp_path / "s"):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1024)
        request = b'{"args": {"container_image": "debian"}}'
        writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(request), request))
        head = await reader.readuntil(b"}]")
        sandbox = head.split(b'"sandbox_id":"')[1].split(b'"')[0].decode()
        _reader2, writer2 = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1024)
        writer2.write(f"GET /v1/sandboxes/{sandbox}/files/tree?path=/many HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        longest = 0.0
        for _ in range(100):
            begun = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - begun)
        seen = made
        writer2.transport.abort()
        writer.transport.abort()
        await asyncio.sleep(0.05)
    await edge.aclose()
    assert seen < 10_000, f"{seen} of 20000 headers were made for a client that reads none; the loop stood for {longest:.2f} s"


@pytest.mark.parametrize("factory", LOOPS)
def test_small_messages_of_a_websocket_wait_for_a_client_that_does_not_read(factory, tmp_path):
    taken = 0

    async def app(scope, receive, send):
        nonlocal taken
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(10_000):
            await send({"type": "websocket.send", "bytes": bytes(8192)})
            taken += 8192

    async def main():
        request = (
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        async with listening(app, tmp_path / "s"), asked(tmp_path / "s", request) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 101")
            await asyncio.sleep(0.3)
            return taken

    assert run(factory, main) < 4 << 20


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize("size", [1, 100, 8191, 16384, 65536])
def test_a_stream_arrives_whole_and_in_order_at_a_slow_reader(factory, size, tmp_path):
    count = max(64, (2 << 20) // size) if size > 1 else 3000

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (size * count))]})
        for index in range(count):
            await send({"type": "http.response.body", "body": bytes([index % 251]) * size, "more_body": True})
            if index % 7 == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def main():
        async with listening(app, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            got = b""
            while len(got) < size * count:
                got += await reader.read(100_000)
                await asyncio.sleep(0)
            writer.close()
            return got

    assert run(factory, main) == b"".join(bytes([index % 251]) * size for index in range(count))


# -- endings


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize("path", ["/v1/health", "/v1/node"])
def test_a_client_that_has_closed_its_sending_side_is_answered(path, factory, tmp_path):
    """As `printf ... | nc -N` and many a health checker do."""

    def ask():
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(tmp_path / "s"))
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            client.shutdown(socket.SHUT_WR)
            got = b""
            while piece := client.recv(65536):
                got += piece
            return got

    async def main():
        edge = EdgeDouble()
        async with ApiServer(edge, tmp_path / "s"):
            answers = [await asyncio.to_thread(ask) for _ in range(20)]
        await edge.aclose()
        return answers

    assert [each[:12] for each in run(factory, main)] == [b"HTTP/1.1 200"] * 20


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("how", ["reset", "close", "unread"])
@pytest.mark.parametrize("factory", LOOPS)
def test_an_answer_to_a_client_that_has_just_gone_is_no_error_of_the_loop(factory, how, turns, tmp_path):
    noticed = []

    async def app(scope, receive, send):
        if how == "unread":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.05)
        client = clients.pop()
        if how == "reset" and client.family == socket.AF_INET:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        time.sleep(0.01)  # noqa: ASYNC251
        for _ in range(turns):
            await asyncio.sleep(0)
        if how == "unread":
            await send({"type": "http.response.body", "body": b"y", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await answer(send)

    clients = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: noticed.append(context))
        if how == "reset":
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            made = _Listener(app, listener)
            await made.start()
            client = socket.create_connection(listener.getsockname())
            clients.append(client)
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.1)
            await made.aclose(0.2)
            return
        async with listening(app, tmp_path / "s"):
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(tmp_path / "s"))
            clients.append(client)
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.15)

    run(factory, main)
    assert noticed == []


@pytest.mark.parametrize("factory", LOOPS)
def test_what_was_written_goes_out_before_a_close(factory, tmp_path):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close"), (b"content-length", b"40002")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b" * 40_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"c", "more_body": False})

    async def main():
        async with listening(app, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            got = await asyncio.wait_for(reader.read(), 2)
            writer.close()
            return got.partition(b"\r\n\r\n")[2]

    assert run(factory, main) == b"a" + b"b" * 40_000 + b"c"


@pytest.mark.parametrize("factory", LOOPS)
def test_pipelined_requests_are_answered_in_order_and_garbage_ends_it(factory, tmp_path):
    async def app(scope, receive, send):
        await asyncio.sleep(0.01)
        await answer(send, scope["path"].encode())

    async def main():
        async with listening(app, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % index for index in range(3)))
            await asyncio.sleep(0.1)
            writer.write(b"\0\1garbage\r\n\r\n")
            got = await asyncio.wait_for(reader.read(), 2)
            writer.close()
            return got

    got = run(factory, main)
    parts = got.split(b"HTTP/1.1 ")[1:]
    assert [part.partition(b"\r\n\r\n")[2] for part in parts[:3]] == [b"/0", b"/1", b"/2"]
    assert parts[3].startswith(b"400 Bad")


@pytest.mark.parametrize("factory", LOOPS)
def test_100_continue_comes_before_the_body_is_sent(factory, tmp_path):
    async def app(scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        await answer(send, body)

    async def main():
        async with listening(app, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
            assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 1) == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hello")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"hello"
            writer.close()

    run(factory, main)
