"""Input that was accepted reaches the command, however soon its stream is left."""

from __future__ import annotations

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, sync
from libdsec import portal as portals

pytestmark = [pytest.mark.root, pytest.mark.slow]

ARGS = DSecContainerRunArgs(container_image="tiny", memory_limit_mb=512, disk_limit_mb=256)
TIMES = 20


@pytest.fixture
async def sandbox(node):
    async with DSecClient(node.url) as client:
        async with await client.run_container(ARGS) as made:
            yield made


@pytest.mark.parametrize("data", [b"x\n", b"y" * (1 << 20)], ids=["a-line", "a-window"])
async def test_input_and_its_end_arrive_though_the_stream_is_left_at_once(sandbox, data):
    for _ in range(TIMES):
        process = await sandbox.start(["cat"], open_stdin=True)
        await process.write_stdin(data)
        await process.close_stdin()
        await process.aclose()
        assert (await process.wait(10)).stdout == data


@pytest.mark.parametrize("data", [b"x\n", b"y" * (1 << 20)], ids=["a-line", "a-window"])
async def test_the_same_by_a_stream_of_its_own(sandbox, data):
    for _ in range(TIMES):
        process = await sandbox.process((await sandbox.start(["cat"], open_stdin=True)).op_id)
        async with process.attach() as stream:
            await stream.write_stdin(data)
            await stream.close_stdin()
        assert (await process.wait(10)).stdout == data


async def test_what_several_streams_send_one_after_another_comes_in_that_order(sandbox):
    process = await sandbox.start(["cat"], open_stdin=True)
    lines = [b"line %d\n" % number for number in range(TIMES)]
    for line in lines:
        async with process.attach() as stream:
            await stream.write_stdin(line)
    await process.close_stdin()
    assert (await process.wait(10)).stdout == b"".join(lines)
    await process.aclose()


async def test_a_program_that_reads_late_gets_what_was_sent_before_its_writer_left(sandbox, monkeypatch):
    monkeypatch.setattr("libdsec.stream._PARTING_SECONDS", 0.05)
    process = await sandbox.start(["sh", "-c", "sleep 0.5; cat; echo done"], open_stdin=True)
    data = b"y" * (3 << 18)
    await process.write_stdin(data)
    await process.close_stdin()
    await process.aclose()
    assert (await process.wait(10)).stdout == data + b"done\n"


def test_the_twin_loses_no_input_either(node):
    try:
        with sync.DSecClient(node.url) as client, client.run_container(ARGS) as sandbox:
            for _ in range(TIMES):
                process = sandbox.start(["cat"], open_stdin=True)
                process.write_stdin("x\n")
                process.close_stdin()
                process.aclose()
                assert process.wait(10).stdout == b"x\n"
    finally:
        portals.shutdown()
