"""The blocking twin: the same names and arguments as the async SDK, and the same behaviour."""

from __future__ import annotations

import inspect
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sync_stub

import libdsec
from libdsec import client as async_client
from libdsec import files, portal, ports, process, sandbox, session, stream, sync

PAIRS = [
    (async_client.DSecClient, sync.DSecClient),
    (files.Files, sync.Files),
    (ports.PortHttp, sync.PortHttp),
    (ports.TcpConnection, sync.TcpConnection),
    (process.Process, sync.Process),
    (sandbox.Sandbox, sync.Sandbox),
    (session.Session, sync.Session),
    (stream.ProcessStream, sync.ProcessStream),
]
SERVER = Path(__file__).parent / "durable_server.py"


def public(kind):
    return {name: member for name, member in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(("original", "twin"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_public_name_has_a_twin_with_the_same_signature(original, twin):
    assert public(original).keys() == public(twin).keys()
    for name, member in public(original).items():
        if isinstance(member, property):
            continue
        made = vars(twin)[name]
        assert inspect.signature(made) == inspect.signature(member), name
        assert made.__doc__ == member.__doc__
        assert not inspect.iscoroutinefunction(made)
        assert not inspect.isasyncgenfunction(made)
    for asynchronous, blocking in (("__aenter__", "__enter__"), ("__aexit__", "__exit__"), ("__aiter__", "__iter__")):
        assert hasattr(original, asynchronous) == hasattr(twin, blocking)
    assert inspect.signature(twin) == inspect.signature(original)


def test_no_public_async_class_is_without_a_twin():
    found = set()
    for module in (async_client, files, ports, process, sandbox, session, stream):
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isclass(member) and any(
                inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in vars(member).values()
            ):
                found.add(member)
    assert found == {original for original, _ in PAIRS}


def test_the_types_of_the_twin_are_those_of_the_original():
    assert sync_stub.STUB.read_text() == sync_stub.written(), f"run {sync_stub.__file__}"
    assert set(sync_stub.TWINS) == {original.__name__ for original, _ in PAIRS}


def test_the_module_has_what_libdsec_has():
    for name in libdsec.__all__:
        assert getattr(sync, name) is not None
    assert sync.DSecContainerRunArgs is libdsec.DSecContainerRunArgs
    assert sync.NotFound is libdsec.NotFound
    assert set(libdsec.__all__) <= set(sync.__all__)
    with pytest.raises(AttributeError):
        sync.nothing  # noqa: B018


@pytest.fixture(autouse=True)
def no_loop_stays():
    yield
    portal.shutdown()


@pytest.fixture
def served(tmp_path):
    """A server in a thread of its own, as another process would be."""
    import asyncio

    from edge_double import EdgeDouble

    from dsec.apiserver import ApiServer

    (tmp_path / "root").mkdir()
    edge = EdgeDouble(tmp_path / "root")
    edge.url = f"unix://{tmp_path}/dsec.sock"
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ending = asyncio.Event()

    async def main():
        async with ApiServer(edge, tmp_path / "dsec.sock"):
            ready.set()
            await ending.wait()
        await edge.aclose()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(10)
    yield edge
    loop.call_soon_threadsafe(ending.set)
    thread.join(10)
    loop.close()


def test_the_twin_does_what_the_original_does(served):
    with sync.DSecClient(served.url) as client:
        with client.run_container(sync.DSecContainerRunArgs(container_image="debian")) as made:
            assert isinstance(made, sync.Sandbox)
            assert made.run_shell("echo hi").stdout_text == "hi\n"
            with pytest.raises(sync.NotFound):
                client.get("sb-none")
            made.files.write("/a", (piece for piece in (b"1", b"2")))
            for pieces in (iter([b"1", b"2"]), map(bytes, [b"1", b"2"]), io.BytesIO(b"12")):
                made.files.write("/a", pieces)
                assert made.files.read("/a") == b"12"
            with pytest.raises(sync.InvalidArgument):
                made.files.write("/a", [b"1"])
            made.files.write("/b", "text")
            assert made.files.read("/a") == b"12"
            assert [each.path for each in made.files.list("/")] == ["/a", "/b"]
            assert b"".join(made.files.stream("/b")) == b"text"
            running = made.start(["cat"], open_stdin=True)
            assert isinstance(running, sync.Process)
            running.write_stdin("in")
            running.close_stdin()
            assert list(running.output()) == [(1, b"in")]
            assert running.wait().ok
            running.aclose()
            with running.attach(stdout_offset=1) as watching:
                assert list(watching) == [(1, b"n")]
                assert watching.result.exit_code == 0
            with made.open_session() as shell:
                shell.run("x=1")
                assert shell.run("echo $x").stdout == b"1\n"
            with pytest.raises(sync.NotFound):
                made.http(1).get()
            many = client.run_many(sync.DSecContainerRunArgs(container_image="debian"), count=2)
            assert all(isinstance(each, sync.Sandbox) for each in many)
            assert made.sandbox_id in repr(made)
        assert made.info().state == "stopped"


async def test_it_works_where_a_loop_runs_already(served):
    with sync.DSecClient(served.url) as client:
        assert client.node().edge == "double"


def test_a_forked_child_has_a_loop_of_its_own(served):
    with sync.DSecClient(served.url) as client:
        client.node()
    script = f"""
import os, sys
from libdsec.sync import DSecClient
with DSecClient({served.url!r}) as client:
    client.node()
pid = os.fork()
if pid == 0:
    with DSecClient({served.url!r}) as client:
        os._exit(0 if client.node().edge == "double" else 1)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=30, env=environment(), check=False).returncode == 0


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(libdsec.__file__).parents[1])}


@pytest.mark.slow
def test_ctrl_c_stops_what_was_made(served):
    script = f"""
import sys
from libdsec.sync import DSecClient, DSecContainerRunArgs
with DSecClient({served.url!r}) as client:
    with client.run_container(DSecContainerRunArgs(container_image="debian")) as sandbox:
        print(sandbox.sandbox_id, flush=True)
        sandbox.exec(["sleep", "60"])
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
    try:
        sandbox_id = child.stdout.readline().strip()
        deadline = threading.Event()
        for _ in range(1000):
            if served.runs:
                break
            deadline.wait(0.01)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
        child.wait()
    assert "KeyboardInterrupt" in errors
    assert child.returncode == -signal.SIGINT
    assert served.sandboxes[sandbox_id].state == "stopped"


def test_the_end_of_a_portal_ends_what_runs_on_it():
    import asyncio

    own = portal.Portal()
    ended, outcomes = [], []

    async def numbers():
        try:
            for number in range(10):
                yield number
        finally:
            ended.append("iteration")

    def wait():
        try:
            own.run(asyncio.sleep(1000))
        except asyncio.CancelledError:
            outcomes.append("cancelled")

    left = numbers()
    assert own.run(portal._step(left)) == 0
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert own.run(_tasks_are(2))
    own.close()
    waiter.join(10)
    assert (ended, outcomes) == (["iteration"], ["cancelled"])


async def _tasks_are(count: int) -> bool:
    import asyncio

    async with asyncio.timeout(10):
        while True:
            if len(asyncio.all_tasks()) >= count:
                return True
            await asyncio.sleep(0)
