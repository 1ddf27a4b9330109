"""How sandboxes end by themselves, on the real kernel, as the edge tells it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from dsec.backends.container import wire
from libdsec.errors import Conflict, NotFound, SandboxFailed
from libdsec.schema import ContainerRunArgs, CreateRequest, ExecRequest, SessionRequest, SessionRunRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
async def edge(real_edge):
    return real_edge


async def make(edge, **args) -> str:
    arguments = ContainerRunArgs(**{"container_image": "tiny", "memory_limit_mb": 64, "disk_limit_mb": 16, **args})
    return (await edge.create(CreateRequest(args=arguments))).sandboxes[0].sandbox_id


def pid_of(edge, sandbox_id: str, tag: int) -> int:
    return edge._core.sandboxes[sandbox_id].channel._watch.ready.result().number(tag)


async def running_command(edge, sandbox_id: str) -> asyncio.Task:
    call = asyncio.ensure_future(edge.exec(sandbox_id, ExecRequest(shell="touch /tmp/begun; sleep 1000", op_id="a")))
    deadline = asyncio.get_running_loop().time() + 10
    while (await edge.exec(sandbox_id, ExecRequest(argv=["test", "-e", "/tmp/begun"]))).exit_code != 0:
        assert asyncio.get_running_loop().time() < deadline
    return call


@pytest.mark.parametrize(("tag", "cause"), [(wire.T_INIT_PID, "init-died"), (wire.T_AETHER_PID, "channel-closed")])
async def test_a_killed_part_fails_the_sandbox_with_its_cause(edge, tag, cause):
    sandbox = await make(edge)
    call = await running_command(edge, sandbox)
    os.kill(pid_of(edge, sandbox, tag), signal.SIGKILL)
    with pytest.raises(SandboxFailed) as raised:
        await asyncio.wait_for(call, 20)
    assert (raised.value.cause, raised.value.ran) in [(cause, "ran"), (cause, "unknown")]
    info = await edge.stop(sandbox)
    assert (info.state, info.cause) == ("failed", cause)
    assert await edge._core.backends["container"].owned() == set()
    with pytest.raises(SandboxFailed) as raised:
        await edge.exec(sandbox, ExecRequest(argv=["true"]))
    assert (raised.value.cause, raised.value.ran) == (cause, "not-run")


async def test_a_command_that_takes_all_memory_says_so_and_the_sandbox_lives(edge):
    sandbox = await make(edge)
    result = await edge.exec(sandbox, ExecRequest(shell="tail /dev/zero", timeout=30))
    assert result.oom
    assert result.exit_code != 0
    assert (await edge.exec(sandbox, ExecRequest(shell="echo alive"))).stdout == b"alive\n"


async def test_a_process_that_memory_ended_is_told_though_its_command_did_well(edge):
    sandbox = await make(edge)
    result = await edge.exec(sandbox, ExecRequest(shell="tail /dev/zero | cat", timeout=30))
    assert (result.exit_code, result.oom) == (0, True)
    assert not (await edge.exec(sandbox, ExecRequest(shell="true"))).oom
    session = await edge.open_session(sandbox, SessionRequest())
    for text, oom in (("tail /dev/zero | cat", True), ("true", False)):
        result = await edge.run_in_session(sandbox, session.session_id, SessionRunRequest(shell=text, timeout=30))
        assert (result.exit_code, result.oom) == (0, oom)


async def test_stopping_ends_a_running_command_with_a_typed_error(edge):
    sandbox = await make(edge)
    call = await running_command(edge, sandbox)
    info = await edge.stop(sandbox)
    assert info.state == "stopped"
    with pytest.raises(SandboxFailed) as raised:
        await asyncio.wait_for(call, 20)
    assert (raised.value.cause, raised.value.ran) in [("stopped", "ran"), ("stopped", "unknown")]
    assert (await edge.process(sandbox, "a")).state in ("exited", "lost")


async def test_a_paused_one_with_a_running_command_can_be_stopped(edge):
    sandbox = await make(edge)
    call = await running_command(edge, sandbox)
    await edge.pause(sandbox)
    assert (await asyncio.wait_for(edge.stop(sandbox), 20)).state == "stopped"
    with pytest.raises(SandboxFailed):
        await call


async def test_idle_ones_are_stopped_and_nothing_is_left(edge):
    sandbox = await make(edge, ttl_running_stop=0.3)
    assert (await edge.exec(sandbox, ExecRequest(shell="sleep 0.6; echo done"))).stdout == b"done\n"
    deadline = asyncio.get_running_loop().time() + 10
    while (info := await edge.get(sandbox)).state != "stopped":
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)
    assert info.stop_reason == "idle"
    assert await edge._core.backends["container"].owned() == set()


async def test_a_refused_command_frees_its_id(edge):
    sandbox = await make(edge)
    with pytest.raises(NotFound) as raised:
        await edge.exec(sandbox, ExecRequest(argv=["nosuchprogram"], op_id="a"))
    assert raised.value.ran == "not-run"
    deadline = asyncio.get_running_loop().time() + 5
    while True:
        # The refused session's process takes a moment to go.
        with contextlib.suppress(Conflict):
            assert (await edge.exec(sandbox, ExecRequest(argv=["true"], op_id="a"))).exit_code == 0
            break
        assert asyncio.get_running_loop().time() < deadline


async def test_a_started_commands_output_can_be_read_while_and_after_it_runs(edge):
    sandbox = await make(edge)
    process = await edge.start(sandbox, ExecRequest(shell="echo first; read line; echo $line; exit 3", open_stdin=True))
    deadline = asyncio.get_running_loop().time() + 10
    while (piece := await edge.output(sandbox, process.op_id, 1)).data != b"first\n":
        assert asyncio.get_running_loop().time() < deadline
    assert not piece.eof
    attachment = await edge.attach(sandbox, process.op_id)
    await attachment.write_stdin(b"second\n")
    await attachment.aclose()
    assert (await edge.result(sandbox, process.op_id, wait=10)).exit_code == 3
    rest = await edge.output(sandbox, process.op_id, 1, piece.next_offset)
    assert (rest.data, rest.eof) == (b"second\n", True)


async def test_a_session_keeps_its_folder(edge):
    sandbox = await make(edge)
    session = await edge.open_session(sandbox, SessionRequest())
    await edge.run_in_session(sandbox, session.session_id, SessionRunRequest(shell="cd /tmp; export A=1"))
    result = await edge.run_in_session(sandbox, session.session_id, SessionRunRequest(shell="echo $PWD $A", op_id="a"))
    assert result.stdout == b"/tmp 1\n"
    assert (await edge.result(sandbox, "a")).stdout == b"/tmp 1\n"
    await edge.close_session(sandbox, session.session_id)
    assert [info.state for info in await edge.sessions(sandbox)] == ["closed"]
