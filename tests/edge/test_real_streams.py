"""Live views of commands that end, on the real kernel: whoever follows gets all of the output and the result."""

from __future__ import annotations

import asyncio

import pytest
from edge_node import until

from dsec.backends.protocol import OutputChunk
from libdsec.schema import ContainerRunArgs, CreateRequest, ExecRequest, ExecResult, SessionRequest, SessionRunRequest, StreamOutput

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
async def edge(real_edge):
    return real_edge


@pytest.fixture
async def sandbox(edge):
    arguments = ContainerRunArgs(container_image="tiny", memory_limit_mb=64, disk_limit_mb=16)
    return (await edge.create(CreateRequest(args=arguments))).sandboxes[0].sandbox_id


async def rest_of(attachment) -> tuple[bytes, int, ExecResult]:
    """What it still brings: standard output, how much of it is missing, the result."""
    output, at, missing = [], None, 0
    async for item in attachment:
        if isinstance(item, OutputChunk):
            missing += 0 if at is None else item.offset - at
            at = item.offset + len(item.data)
            output.append(item.data)
            await attachment.consumed(item.stream, len(item.data))
        elif isinstance(item, ExecResult):
            return b"".join(output), missing, item
    raise AssertionError("the view ended without a result")


async def forgotten(edge, sandbox) -> None:
    """Wait until the result is on disk and whoever is to be told of it was told."""
    core = edge._core
    await core.journal.flush()
    live = core.sandboxes[sandbox]
    await until(lambda: not (live.ops or live.acking or live.unacknowledged), 10)


async def nothing_is_kept(edge, sandbox) -> None:
    """Wait until aether knows of no session any more."""
    async with asyncio.timeout(10):
        while await edge._core.sandboxes[sandbox].channel.sessions():
            pass


async def test_a_reader_who_takes_his_time_gets_what_the_record_has_not(edge, sandbox):
    request = ExecRequest(shell="yes | head -c 300000", op_id="a", output_limit_bytes=4096)
    await edge.start(sandbox, request)
    attachment = await edge.attach(sandbox, "a", credit=1024)
    try:
        recorded = await edge.result(sandbox, "a", wait=10)
        assert recorded.stdout_dropped > 0
        await forgotten(edge, sandbox)
        output, missing, result = await rest_of(attachment)
        assert (len(output), missing, result.exit_code) == (300_000, 0, 0)
    finally:
        await attachment.aclose()
    await forgotten(edge, sandbox)
    await nothing_is_kept(edge, sandbox)


async def test_a_view_that_breaks_off_goes_on_from_the_record(edge, sandbox):
    await edge.start(sandbox, ExecRequest(shell="echo first; read x; echo second; exit 3", op_id="a", open_stdin=True))
    attachment = await edge.attach(sandbox, "a")
    other = await edge.attach(sandbox, "a")
    try:
        assert (await anext(attachment)).data == b"first\n"
        attachment._inner._sock.shutdown(0)
        await other.write_stdin(b"\n")
        output, missing, result = await rest_of(attachment)
        assert (output, missing, result.exit_code) == (b"second\n", 0, 3)
    finally:
        await attachment.aclose()
        await other.aclose()


async def test_a_command_that_waits_for_its_turn_in_a_shell_can_be_followed(edge, sandbox):
    session = (await edge.open_session(sandbox, SessionRequest())).session_id

    def run(op: str, text: str) -> asyncio.Task[ExecResult]:
        return asyncio.ensure_future(edge.run_in_session(sandbox, session, SessionRunRequest(shell=text, op_id=op)))

    await edge.exec(sandbox, ExecRequest(shell="mkfifo /tmp/gate"))
    calls = [run("first", "read x < /tmp/gate; echo $x"), run("second", "echo after $x; exit_with() { return 3; }; exit_with")]
    await until(lambda: len(edge._core.sandboxes[sandbox].ops) == 2)
    following = asyncio.ensure_future(edge.attach(sandbox, "second"))
    assert await asyncio.wait_for(edge.output(sandbox, "second", 1), 5) == StreamOutput(data=b"", offset=0, next_offset=0)
    await edge.exec(sandbox, ExecRequest(shell="echo gone > /tmp/gate"))
    first, second = await asyncio.wait_for(asyncio.gather(*calls), 10)
    assert (first.stdout, second.stdout, second.exit_code) == (b"gone\n", b"after gone\n", 3)
    attachment = await asyncio.wait_for(following, 5)
    try:
        output, missing, result = await rest_of(attachment)
        assert (output, missing, result.exit_code) == (b"after gone\n", 0, 3)
    finally:
        await attachment.aclose()


async def test_commands_that_end_at_once_bring_their_result_to_whoever_follows(edge, sandbox):
    async def one(number: int) -> None:
        op = f"op-{number}"
        await edge.start(sandbox, ExecRequest(shell=f"echo {number}", op_id=op))
        attachment = await edge.attach(sandbox, op, credit=0)
        try:
            await attachment.consumed(1, 4096)
            output, _, result = await rest_of(attachment)
            assert (output, result.exit_code) == (b"%d\n" % number, 0)
        finally:
            await attachment.aclose()

    for first in range(0, 64, 8):
        await asyncio.gather(*(one(number) for number in range(first, first + 8)))
    await forgotten(edge, sandbox)
    await nothing_is_kept(edge, sandbox)
