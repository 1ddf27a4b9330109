"""The client over both transports: batches, clean-up after errors and cancellations, what is repeated."""

from __future__ import annotations

import asyncio

import pytest
from polling import until

from libdsec import (
    ConnectionFailed,
    Denied,
    DSecClient,
    DSecContainerRunArgs,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Timeouts,
    Unsupported,
)
from libdsec.api import Api
from libdsec.asgi import AsgiTransport
from libdsec.schema import BatchResult, ErrorBody, ExecRequest, SandboxInfo
from libdsec.shielding import finish
from libdsec.transport import Reply, open_transport

ARGS = DSecContainerRunArgs(container_image="debian")


def states(edge):
    return [info.state for info in edge.sandboxes.values()]


async def test_many_are_made_at_once_and_found_by_label(client):
    made = await client.run_many(DSecContainerRunArgs(container_image="debian", labels={"job": "a"}), count=5)
    await client.run_container(ARGS)
    assert len({sandbox.sandbox_id for sandbox in made}) == 5
    assert {info.sandbox_id for info in await client.list(labels={"job": "a"})} == {sandbox.sandbox_id for sandbox in made}
    await made[0].stop()
    assert len(await client.list(state="running")) == 5
    again = await client.get(made[1].sandbox_id)
    assert (await again.update(labels={"job": "b"})).labels == {"job": "b"}
    assert (await again.pause()).state == "paused"
    assert (await again.resume()).state == "running"


async def test_files_streams_and_ports_work_over_both(client):
    async with await client.run_container(ARGS) as sandbox:
        await sandbox.files.write("/f", b"x" * 500_000)
        assert len(await sandbox.files.read("/f", start=1)) == 499_999
        process = await sandbox.start(["cat"], open_stdin=True)
        await process.write_stdin(b"data")
        await process.close_stdin()
        assert [piece async for piece in process.output()] == [(1, b"data")]
        await process.aclose()
        with pytest.raises(NotFound):
            async with sandbox.tcp(1) as connection:
                await connection.read()


async def test_the_other_backends_are_refused_at_create(client):
    for run in (client.run_fncall, client.run_microvm, client.run_fullvm):
        with pytest.raises(Unsupported) as caught:
            await run(ARGS)
        assert (caught.value.field, caught.value.ran) == ("backend", "not-run")
    with pytest.raises(InvalidArgument):
        await client.run_many(ARGS, count=0)
    sandbox = await client.run_container(ARGS)
    with pytest.raises(InvalidArgument):
        await sandbox.exec("true")


async def test_a_partial_batch_is_stopped_unless_it_is_wanted(client, edge, monkeypatch):
    create = edge.create

    async def partial(request, key=None):
        batch = await create(request, key)
        return BatchResult(
            sandboxes=batch.sandboxes[:2], errors=[ErrorBody(code="overloaded", message="full", ran="not-run", cause="memory")]
        )

    monkeypatch.setattr(edge, "create", partial)
    with pytest.raises(Overloaded) as caught:
        await client.run_many(ARGS, count=3)
    assert caught.value.details == {"made": 2, "failed": 1}
    assert caught.value.cause == "memory"
    assert states(edge).count("stopped") == 2
    assert len(await client.run_many(ARGS, count=3, allow_partial=True)) == 2


async def test_leaving_the_block_stops_the_sandbox_whatever_happened(client, edge):
    with pytest.raises(ZeroDivisionError):
        async with await client.run_container(ARGS):
            raise ZeroDivisionError

    async def work():
        async with await client.run_container(ARGS) as sandbox:
            await sandbox.exec(["sleep", "60"])

    working = asyncio.ensure_future(work())
    await until(lambda: edge.runs == 1)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert states(edge) == ["stopped", "stopped"]


async def test_a_create_cancelled_while_it_is_made_leaves_nothing(client, edge):
    edge.create_gate = asyncio.Event()
    making = asyncio.ensure_future(client.run_many(ARGS, count=3))
    await until(lambda: edge.creates_waiting == 1)
    making.cancel()
    asyncio.get_running_loop().call_later(0.1, edge.create_gate.set)
    with pytest.raises(asyncio.CancelledError):
        await making
    assert set(states(edge)) <= {"stopped"}
    assert len(edge.sandboxes) == 3 or edge.creates_cancelled == 1


async def test_cancelled_twice_it_does_not_wait(client, edge):
    edge.create_gate = asyncio.Event()
    making = asyncio.ensure_future(client.run_container(ARGS))
    await until(lambda: edge.creates_waiting == 1)
    making.cancel()
    await asyncio.sleep(0.05)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await until(lambda: edge.creates_cancelled == 1)
    assert edge.sandboxes == {}


async def test_a_create_that_takes_too_long_is_undone(client, edge):
    edge.create_gate = asyncio.Event()
    with pytest.raises(OutcomeUnknown) as caught:
        await client.run_container(ARGS, timeout=0.2)
    assert caught.value.cause == "timeout"
    await until(lambda: edge.creates_cancelled == 1)


async def test_a_command_that_never_answers_has_an_unknown_outcome(client, edge, monkeypatch):
    client.timeouts = Timeouts(exec_grace=0.2)
    client._api.timeouts = client.timeouts
    async with await client.run_container(ARGS) as sandbox:

        async def hang(sandbox_id, request):
            await asyncio.sleep(60)

        monkeypatch.setattr(edge, "exec", hang)
        with pytest.raises(OutcomeUnknown) as caught:
            await sandbox.run_shell("true", timeout=0.1, kill_grace=0.1, op_id="hung")
        assert caught.value.details == {"op_id": "hung"}


class Scripted:
    """A transport that does what it is told, to see what the SDK repeats."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.calls = []

    async def call(self, method, target, *, body=None, headers=None, timeout=None):
        self.calls.append((method, target.partition("?")[0], (headers or {}).get("Idempotency-Key")))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def aclose(self):
        pass


def answer(value, status=200):
    import msgspec

    return Reply(status, msgspec.msgpack.encode(value), "application/vnd.msgpack")


REFUSED = ConnectionFailed("refused", ran="not-run", cause="connect")
LOST = ConnectionFailed("lost", ran="unknown", cause="broken")
RESULT = {"op_id": "o", "exit_code": 0}
GONE = answer(NotFound("no").to_wire(), 404)
RUNNING = answer({"error": {"code": "conflict", "message": "", "ran": "not-run", "cause": "running"}}, 409)
FULL = answer(Overloaded("full").to_wire(), 503)
EXEC, RECORD = ("POST", "/s/exec", None), ("GET", "/s/processes/o/result", None)


@pytest.mark.parametrize(
    ("outcomes", "calls", "raised"),
    [
        ([REFUSED, REFUSED, answer(RESULT)], [EXEC, EXEC, EXEC], None),
        ([FULL, answer(RESULT)], [EXEC, EXEC], None),
        ([LOST, answer(RESULT)], [EXEC, RECORD], None),
        ([LOST, REFUSED, LOST, RUNNING, RUNNING, answer(RESULT)], [EXEC, RECORD, RECORD, RECORD, RECORD, RECORD], None),
        ([LOST, GONE, answer(RESULT)], [EXEC, RECORD, EXEC], None),
        ([LOST, GONE, GONE], [EXEC, RECORD, EXEC], OutcomeUnknown),
        ([GONE], [EXEC], NotFound),
    ],
)
async def test_what_is_repeated_of_a_command(outcomes, calls, raised):
    transport = Scripted(*outcomes)
    api = Api(transport, Timeouts())
    if raised is None:
        assert (await api.run("/s/exec", "/s", ExecRequest(op_id="o"), "o", None)).exit_code == 0
    else:
        with pytest.raises(raised):
            await api.run("/s/exec", "/s", ExecRequest(op_id="o"), "o", None)
    assert transport.calls == calls


async def test_what_is_repeated_of_the_rest():
    info = answer(SandboxInfo(sandbox_id="s", backend="container", state="running"))
    api = Api(Scripted(LOST, REFUSED, info), Timeouts())
    assert (await api.call("GET", "/s", SandboxInfo, idempotent=True)).sandbox_id == "s"
    transport = Scripted(REFUSED, LOST)
    with pytest.raises(OutcomeUnknown):
        await Api(transport, Timeouts()).call("POST", "/s/sessions", SandboxInfo)
    assert len(transport.calls) == 2


async def test_a_create_is_repeated_with_its_key():
    batch = answer(BatchResult(sandboxes=[SandboxInfo(sandbox_id="s", backend="container", state="running")]))
    transport = Scripted(LOST, batch)
    await DSecClient(transport=transport).run_container(ARGS)
    keys = [key for _, _, key in transport.calls]
    assert keys[0]
    assert keys[0] == keys[1]


async def test_a_token_is_asked_for_in_process_too(edge):
    from dsec.apiserver import create_app

    app = await asyncio.to_thread(create_app, edge, "right")
    async with DSecClient(transport=AsgiTransport(app, "right")) as client:
        assert (await client.node()).edge == "double"
    with pytest.raises(Denied):
        await DSecClient(transport=AsgiTransport(app)).open()


@pytest.mark.parametrize("url", ["", "unix://", "ftp://host", "/run/dsec.sock", "http://"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(InvalidArgument) as caught:
        open_transport(url, None, Timeouts())
    assert caught.value.field == "url"


async def test_finish_ends_the_work_before_the_cancellation():
    done = asyncio.Event()

    async def work():
        await asyncio.sleep(0.05)
        done.set()

    task = asyncio.ensure_future(finish(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
