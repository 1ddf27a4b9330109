"""Calls over a kept connection, against servers that answer as they should and as they should not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvloop

from libdsec.errors import ConnectionFailed
from libdsec.timeouts import Timeouts
from libdsec.transport import open_transport

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def run(factory, main):
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


class Script:
    """A server that keeps what each connection sent and answers by `answer(request_number, head) -> bytes | None`; None closes."""

    def __init__(self, folder, answer):
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.path = folder / "s"
        self.url = f"unix://{self.path}"

    async def __aenter__(self):
        self.server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def __aexit__(self, *exc):
        self.server.close()
        for writer in self.writers:
            writer.close()
        await asyncio.sleep(0.02)

    async def _serve(self, reader, writer):
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        head += await reader.readexactly(int(line.split(b":")[1]))
                self.requests.append(head)
                answer = self.answer(len(self.requests), head)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if answer.endswith(b"<close>"):
                    break
        writer.close()


@contextlib.asynccontextmanager
async def opened(url, token=None, timeouts=None):
    transport = open_transport(url, token, timeouts or Timeouts(connect=2.0))
    try:
        yield transport
    finally:
        await transport.aclose()


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_answers_without_a_body_end_with_the_head_and_the_connection_is_kept(status, tmp_path):
    async with Script(tmp_path, lambda n, head: b"HTTP/1.1 " + status + b"\r\n\r\n") as server, opened(server.url) as transport:
        for _ in range(2):
            assert (await transport.call("DELETE", "/x", timeout=2)).body == b""
        assert server.connections == 1


async def test_a_head_request_is_answered_without_a_body(tmp_path):
    async with Script(tmp_path, lambda n, head: b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n") as server, opened(server.url) as transport:
        assert (await transport.call("HEAD", "/x", timeout=1)).status == 200


async def test_interim_answers_are_passed_over(tmp_path):
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nContent-Type: x/y\r\nLink: </a>\r\n\r\n" + OK
    async with Script(tmp_path, lambda n, head: answer) as server, opened(server.url) as transport:
        for _ in range(2):
            reply = await transport.call("GET", "/x", timeout=2)
            assert (reply.status, reply.body, reply.content_type) == (200, b"ok", "")
        assert server.connections == 1


async def test_chunks_with_trailers_and_empty_headers(tmp_path):
    answer = (
        b"HTTP/1.1 200 OK\r\nX-Empty:\r\nContent-Type: application/vnd.msgpack\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    async with Script(tmp_path, lambda n, head: answer) as server, opened(server.url) as transport:
        for _ in range(2):
            reply = await transport.call("GET", "/x", timeout=2)
            assert (reply.body, reply.content_type) == (b"abcde", "application/vnd.msgpack")
        assert server.connections == 1


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nGARBAGE",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc<close>"[:-7] + b"<close>",
    ],
)
def test_what_is_no_answer_is_a_failed_connection(factory, answer, tmp_path):
    noticed = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noticed.append(context))
        async with Script(tmp_path, lambda n, head: answer + b"<close>") as server, opened(server.url) as transport:
            if b"Content-Length: 10" in answer:
                server.answer = lambda n, head: b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc<close>"
            with pytest.raises(ConnectionFailed) as caught:
                await transport.call("GET", "/x", timeout=2)
            assert caught.value.ran == "unknown"

    run(factory, main)
    assert noticed == []


# -- what is behind an answer


@pytest.mark.parametrize(
    "behind",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Poison: ",
        b"HTT",
    ],
)
async def test_a_connection_with_bytes_behind_its_answer_is_not_used_again(behind, tmp_path):
    async with Script(tmp_path, lambda n, head: (OK + behind) if n == 1 else OK) as server, opened(server.url) as transport:
        assert (await transport.call("GET", "/1", timeout=1)).body == b"ok"
        assert (await transport.call("GET", "/2", timeout=1)).body == b"ok"
        assert server.connections == 2


async def test_bytes_that_come_later_end_the_connection(tmp_path):
    async with Script(tmp_path, lambda n, head: OK) as server, opened(server.url) as transport:
        await transport.call("GET", "/1", timeout=1)
        server.writers[0].write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(0.05)
        assert (await transport.call("GET", "/2", timeout=1)).body == b"ok"
        assert server.connections == 2


# -- a server that went away


class ThreadServer:
    """One connection at a time, answered in a thread, so that the client's loop can be held up meanwhile."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(16)
        self.requests = 0
        self.current: socket.socket | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.current = connection
                while data := connection.recv(65536):
                    self.requests += 1
                    assert data.endswith(b"\r\n\r\n")
                    connection.sendall(OK)

    def hang_up(self):
        self.current.shutdown(socket.SHUT_RDWR)
        self.current.close()

    def close(self):
        with contextlib.suppress(OSError):
            self.current.shutdown(socket.SHUT_RDWR)
            self.current.close()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("factory", LOOPS)
def test_a_kept_connection_whose_end_the_loop_has_seen_is_not_used(factory, turns, tmp_path):
    """With 0 and 1 turns the end has not been read yet: then the outcome may be unknown. From then on it must be a fresh connection."""
    server = ThreadServer(tmp_path / "s")

    async def main():
        async with opened(f"unix://{tmp_path}/s") as transport:
            await transport.call("GET", "/1", timeout=2)
            server.hang_up()
            time.sleep(0.05)  # noqa: ASYNC251
            for _ in range(turns):
                await asyncio.sleep(0)
            await transport.call("POST", "/2", body=b"", timeout=2)

    try:
        if turns < 2:
            with contextlib.suppress(ConnectionFailed):
                run(factory, main)
        else:
            run(factory, main)
            assert server.requests == 2
    finally:
        server.close()


# -- loops


def test_a_client_of_an_ended_loop_does_not_send_in_the_next_what_nobody_will_hear_answered(tmp_path):
    """Either it works or it says at once that it cannot. In a process of its own, since the first loop's transports are left behind."""
    server = ThreadServer(tmp_path / "s")
    program = f"""
import asyncio
from libdsec.timeouts import Timeouts
from libdsec.transport import open_transport
transport = open_transport("unix://{tmp_path}/s", None, Timeouts())
asyncio.run(transport.call("GET", "/1", timeout=2))
try:
    print(asyncio.run(transport.call("POST", "/2", body=b"", timeout=3)).body)
except RuntimeError as error:
    print(error)
"""
    try:
        begun = time.monotonic()
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=30, check=False)
        assert time.monotonic() - begun < 2.5, f"it waited in vain, and {server.requests} requests reached the server: {done.stdout}"
        assert server.requests == 1 or "ok" in done.stdout
    finally:
        server.close()


# -- leaving


@pytest.mark.parametrize("factory", LOOPS)
def test_cancelled_calls_leave_nothing_and_say_nothing(factory, tmp_path):
    noticed = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: noticed.append(context))

        async def slow(reader, writer):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(0.01)
                writer.write(OK)
                await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(slow, str(tmp_path / "s"))
        async with opened(f"unix://{tmp_path}/s") as transport:
            for delay in [0, 0.0001, 0.0005, 0.001, 0.005, 0.0098, 0.01, 0.0102, 0.0105, 0.011, 0.012] * 5:
                calling = asyncio.ensure_future(transport.call("GET", "/x", timeout=5))
                await asyncio.sleep(delay)
                calling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await calling
            assert not transport._calls._busy
        await asyncio.sleep(0.05)
        server.close()
        gc.collect()
        assert len(asyncio.all_tasks()) == 1

    run(factory, main)
    assert noticed == []


@pytest.mark.parametrize("factory", LOOPS)
def test_closing_ends_calls_under_way_and_leaves_no_socket(factory, tmp_path):
    noticed = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: noticed.append(context))
        gone = asyncio.Event()

        async def silent(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            gone.set()
            writer.close()

        server = await asyncio.start_unix_server(silent, str(tmp_path / "s"))
        async with opened(f"unix://{tmp_path}/s") as transport:
            calling = asyncio.ensure_future(transport.call("GET", "/x", timeout=5))
            await asyncio.sleep(0.05)
            await transport.aclose()
            with pytest.raises(ConnectionFailed):
                await asyncio.wait_for(calling, 1)
            await asyncio.wait_for(gone.wait(), 1)
        server.close()

    run(factory, main)
    assert noticed == []


@pytest.mark.parametrize("uv", [False, True])
def test_a_program_that_closes_its_client_last_prints_no_warning(uv, tmp_path):
    server = ThreadServer(tmp_path / "s")
    program = f"""
import asyncio, uvloop
from libdsec.timeouts import Timeouts
from libdsec.transport import open_transport
async def main():
    transport = open_transport("unix://{tmp_path}/s", None, Timeouts())
    await transport.call("GET", "/x", timeout=5)
    await transport.aclose()
{"uvloop" if uv else "asyncio"}.run(main())
"""
    try:
        command = [sys.executable, "-X", "dev", "-W", "default", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        server.close()


async def test_an_early_answer_to_a_body_that_is_not_read_is_given(tmp_path):
    """A server that refuses by the head, keeps the connection and reads the rest later."""
    done = asyncio.Event()

    async def serve(reader, writer):
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            writer.write(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\n\r\nno")
            await writer.drain()
            await asyncio.sleep(0.05)
            await reader.readexactly(length)
        writer.close()
        done.set()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s"))
    async with opened(f"unix://{tmp_path}/s") as transport:
        for _ in range(2):
            assert (await transport.call("POST", "/x", body=b"x" * 200_000, timeout=2)).status == 413
        await asyncio.wait_for(done.wait(), 2)
        await asyncio.sleep(0.02)
    server.close()


async def test_no_connection_where_a_unix_backlog_is_full_is_told_as_not_run(tmp_path):
    """asyncio by itself takes the EAGAIN of a full backlog for a connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen(0)
    filler = socket.socket(socket.AF_UNIX)
    filler.connect(str(tmp_path / "s"))
    try:
        async with opened(f"unix://{tmp_path}/s", timeouts=Timeouts(connect=0.5)) as transport:
            with pytest.raises(ConnectionFailed) as caught:
                await transport.call("POST", "/x", body=b"", timeout=1)
            assert caught.value.ran == "not-run"
    finally:
        filler.close()
        listener.close()


async def test_header_values_cannot_begin_another_line(tmp_path):
    async with Script(tmp_path, lambda n, head: OK) as server, opened(server.url) as transport:
        for bad in ("a\r\nX-Injected: 1", "a\nX: 1", "a\0b"):
            with pytest.raises(Exception):  # noqa: B017, PT011
                await transport.call("GET", "/x", headers={"Idempotency-Key": bad})
        for bad in ("/x HTTP/1.1\r\nX: 1", "/a b", "/a\nb"):
            with pytest.raises(Exception):  # noqa: B017, PT011
                await transport.call("GET", bad)
        assert server.requests == []


async def test_a_huge_answer_is_taken_whole(tmp_path):
    body = b"x" * (64 << 20)
    async with Script(tmp_path, lambda n, head: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as server:
        async with opened(server.url) as transport:
            assert (await transport.call("GET", "/x", timeout=30)).body == body


# -- the pool


@pytest.mark.parametrize("factory", LOOPS)
def test_idle_connections_are_closed_after_a_while_and_the_timer_ends(factory, monkeypatch, tmp_path):
    monkeypatch.setattr("libdsec.calls.IDLE_CONNECTION_SECONDS", 0.1)

    async def main():
        async with Script(tmp_path, lambda n, head: OK) as server, opened(server.url) as transport:
            await asyncio.gather(*(transport.call("GET", "/x", timeout=5) for _ in range(10)))
            opened_once = server.connections
            await asyncio.gather(*(transport.call("GET", "/x", timeout=5) for _ in range(10)))
            assert server.connections == opened_once
            await asyncio.sleep(0.35)
            assert transport._calls._idle == []
            assert transport._calls._sweep is None
            assert (await transport.call("GET", "/x", timeout=5)).body == b"ok"

    run(factory, main)


async def test_connection_close_is_heeded(tmp_path):
    async with (
        Script(tmp_path, lambda n, head: OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) as server,
        opened(server.url) as transport,
    ):
        for _ in range(3):
            assert (await transport.call("GET", "/x", timeout=5)).body == b"ok"
        assert server.connections == 3


async def test_a_timed_out_call_does_not_poison_the_next(tmp_path):
    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"/slow" in head:
                    await asyncio.sleep(0.2)
                writer.write(OK if b"/slow" not in head else OK.replace(b"ok", b"NO"))
        writer.close()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s"))
    async with opened(f"unix://{tmp_path}/s") as transport:
        for _ in range(3):
            with pytest.raises(ConnectionFailed):
                await transport.call("GET", "/slow", timeout=0.1)
            assert (await transport.call("GET", "/x", timeout=5)).body == b"ok"
            await asyncio.sleep(0.15)
            assert (await transport.call("GET", "/x", timeout=5)).body == b"ok"
    server.close()
    await asyncio.sleep(0.25)


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_an_answer_of_a_server_that_hangs_up_before_it_has_read_the_body_is_given(factory, kind, tmp_path):
    listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    listener.bind(str(tmp_path / "s") if kind == "unix" else ("127.0.0.1", 0))
    listener.listen(8)
    url = f"unix://{tmp_path}/s" if kind == "unix" else f"http://127.0.0.1:{listener.getsockname()[1]}"

    def serve():
        for _ in range(10):
            connection, _ = listener.accept()
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(100)
            connection.sendall(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
            time.sleep(0.01)
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()

    async def main():
        async with opened(url) as transport:
            return [(await transport.call("POST", "/x", body=b"x" * 262_000, timeout=5)).status for _ in range(10)]

    try:
        assert run(factory, main) == [413] * 10
    finally:
        listener.shutdown(socket.SHUT_RDWR) if kind == "unix" else None
        thread.join(1) if not thread.is_alive() else None
        while thread.is_alive():
            with contextlib.suppress(OSError), socket.socket(listener.family) as poke:
                poke.connect(listener.getsockname())
                poke.sendall(b"\r\n\r\n")
                thread.join(0.05)
        listener.close()
