"""Live views: offsets, credit, slow and dead readers, stdin, terminals."""

import asyncio
import re
import signal

import pytest

from dsec.backends.container import wire
from dsec.backends.container.requests import exec_payload
from dsec.backends.protocol import OutputChunk, StreamEnd
from libdsec.errors import Conflict, NotFound
from libdsec.schema import ExecRequest, ExecResult

pytestmark = pytest.mark.root


async def gather(attachment, *, consume=True):
    """Everything until the end: (bytes of both streams, ends in order, result)."""
    streams, ends, result = {1: b"", 2: b""}, [], None
    async with asyncio.timeout(30):
        async for item in attachment:
            match item:
                case OutputChunk(stream, offset, data):
                    assert result is None
                    assert offset == len(streams[stream])
                    streams[stream] += data
                    if consume:
                        await attachment.consumed(stream, len(data))
                case StreamEnd(stream):
                    ends.append(stream)
                case ExecResult():
                    result = item
    return streams, ends, result


async def test_a_live_view_gives_all_output_then_both_ends_then_the_result(box):
    await box.channel.start("op-s", ExecRequest(shell="echo one; echo two >&2; sleep 0.05; echo three; exit 9"))
    streams, ends, result = await gather(await box.channel.attach("op-s"))
    assert streams == {1: b"one\nthree\n", 2: b"two\n"}
    assert sorted(ends) == [1, 2]
    assert (result.exit_code, result.stdout_bytes, result.stdout_dropped) == (9, 10, 0)


async def test_attaching_later_continues_at_an_offset(box):
    await box.channel.exec("op-s", ExecRequest(shell="printf 0123456789"))
    attachment = await box.channel.attach("op-s", stdout_offset=7)
    chunk = await anext(attachment)
    assert (chunk.offset, chunk.data) == (7, b"789")
    await attachment.aclose()


@pytest.mark.slow
async def test_a_reader_that_leaves_at_any_moment_leaves_its_part_to_the_next(box):
    """Also where its end is seen in the same turn as the output that no longer fits, as on a busy machine: nothing is overwritten."""
    for number in range(4):
        await box.channel.start(f"op-busy-{number}", ExecRequest(shell="while :; do :; done", background=True))
    for trial in range(20):
        op_id = f"op-{trial}"
        request = ExecRequest(shell="head -c 12000000 /dev/zero")
        first = await box.channel._request(wire.EXEC, exec_payload(op_id, request, live=True, credit=0))
        assert (await first.next())[0] == wire.STARTED
        await asyncio.sleep(trial % 10 * 0.0005)
        first.close()
        streams, _, result = await gather(await box.channel.attach(op_id))
        assert (trial, len(streams[1]), result.stdout_bytes) == (trial, 12000000, 12000000)


async def test_a_reader_that_leaves_holds_up_nobody_who_reads_the_same(box):
    first = await box.channel._request(
        wire.EXEC, exec_payload("op-s", ExecRequest(shell="head -c 20000000 /dev/zero"), live=True, credit=0)
    )
    assert (await first.next())[0] == wire.STARTED
    attachment = await box.channel.attach("op-s", credit=0)
    first.close()
    await asyncio.sleep(0.1)
    began = asyncio.get_running_loop().time()
    await attachment.consumed(1, 1 << 20)
    streams, _, _ = await gather(attachment)
    assert len(streams[1]) == 20000000
    assert asyncio.get_running_loop().time() - began < 1.9, "what it had not read was held for it"


async def test_attaching_to_an_unknown_command_is_not_found(box):
    with pytest.raises(NotFound):
        await box.channel.attach("op-none")


@pytest.mark.slow
async def test_a_reader_that_gives_no_credit_holds_the_command_back_and_loses_nothing(box, until):
    await box.channel.start("op-s", ExecRequest(shell="head -c 20000000 /dev/zero | tr '\\0' y; touch /tmp/done"))
    attachment = await box.channel.attach("op-s", credit=65536)
    seen = 0
    while seen < 65536:
        seen += len((await anext(attachment)).data)
    assert (await box.sh("test -e /tmp/done")).exit_code == 1
    await attachment.consumed(1, seen)
    streams = seen
    async with asyncio.timeout(30):
        async for item in attachment:
            if isinstance(item, OutputChunk):
                assert item.offset == streams
                streams += len(item.data)
                await attachment.consumed(1, len(item.data))
    assert streams == 20_000_000


@pytest.mark.slow
async def test_what_is_still_in_the_pipe_at_the_end_waits_for_a_reader_without_credit(box, until):
    """All that is kept is full then: 4 MiB and some more, which fits into the pipe, so that the command ends. A second is longer than the
    wait for the output of processes that a command leaves behind."""
    written = 4_254_304
    await box.channel.start("op-s", ExecRequest(shell=f"head -c {written} /dev/zero | tr '\\0' y; touch /tmp/done"))
    attachment = await box.channel.attach("op-s", credit=4)
    seen = len((await anext(attachment)).data)

    async def done():
        return (await box.sh("test -e /tmp/done")).exit_code == 0

    await until(done)
    await box.out("sleep 1")
    await attachment.consumed(1, written)
    async with asyncio.timeout(30):
        async for item in attachment:
            match item:
                case OutputChunk(1, offset, data):
                    assert offset == seen
                    assert data.count(b"y") == len(data)
                    seen += len(data)
                case ExecResult():
                    assert (item.exit_code, item.stdout_bytes) == (0, written)
    assert seen == written


@pytest.mark.slow
async def test_a_reader_that_hangs_up_holds_nobody_back(box):
    await box.channel.start("op-s", ExecRequest(shell="head -c 20000000 /dev/zero; echo end"))
    attachment = await box.channel.attach("op-s", credit=65536)
    await anext(attachment)
    await attachment.aclose()
    result = await asyncio.wait_for(box.channel.wait("op-s"), 30)
    assert result.exit_code == 0
    assert result.stdout.endswith(b"end\n")


async def test_two_readers_see_the_same(box):
    await box.channel.start("op-s", ExecRequest(shell="for i in 1 2 3 4 5; do echo $i; sleep 0.01; done"))
    views = [await box.channel.attach("op-s") for _ in range(2)]
    outputs = await asyncio.gather(*(gather(view) for view in views))
    assert [streams[1] for streams, _, _ in outputs] == [b"1\n2\n3\n4\n5\n"] * 2


async def test_stdin_is_written_live_and_half_closed(box):
    await box.channel.start("op-s", ExecRequest(argv=["sort"], open_stdin=True))
    attachment = await box.channel.attach("op-s")
    await attachment.write_stdin(b"b\n")
    await attachment.write_stdin(b"a\n")
    await attachment.close_stdin()
    with pytest.raises(Conflict):
        await attachment.write_stdin(b"late")
    streams, _, result = await gather(attachment)
    assert (streams[1], result.exit_code) == (b"a\nb\n", 0)


@pytest.mark.slow
async def test_much_stdin_is_written_no_faster_than_it_is_read(box):
    await box.channel.start("op-s", ExecRequest(shell="sleep 0.2; wc -c", open_stdin=True))
    attachment = await box.channel.attach("op-s")

    async def write():
        for _ in range(80):
            await attachment.write_stdin(bytes(100_000))
        await attachment.close_stdin()

    _, (streams, _, result) = await asyncio.gather(write(), gather(attachment))
    assert (streams[1].strip(), result.exit_code) == (b"8000000", 0)


async def test_writing_to_a_command_that_ended_is_a_conflict(box):
    await box.channel.start("op-s", ExecRequest(argv=["true"], open_stdin=True))
    attachment = await box.channel.attach("op-s")
    await gather(attachment)
    with pytest.raises(Conflict):
        await attachment.write_stdin(b"x")
    with pytest.raises(Conflict):
        await attachment.signal(signal.SIGTERM, tree=False)


async def test_a_signal_goes_through_the_live_view(box):
    await box.channel.start("op-s", ExecRequest(shell="trap 'echo term; exit 6' TERM; echo up; while :; do sleep 0.01; done"))
    attachment = await box.channel.attach("op-s")
    assert (await anext(attachment)).data == b"up\n"
    await attachment.signal(signal.SIGTERM, tree=False)
    streams, _, result = await gather_from(attachment)
    assert (streams[1], result.exit_code) == (b"term\n", 6)


async def gather_from(attachment):
    streams, result = {1: b"", 2: b""}, None
    async with asyncio.timeout(30):
        async for item in attachment:
            if isinstance(item, OutputChunk):
                streams[item.stream] += item.data
            elif isinstance(item, ExecResult):
                result = item
    return streams, [], result


async def test_a_terminal_is_one_and_has_the_size_asked_for(box):
    result = await box.sh("test -t 0 && test -t 1 && tty && stty size; echo $TERM", tty=True, rows=33, cols=111)
    assert result.exit_code == 0
    assert re.search(rb"/dev/pts/\d+\r\n33 111\r\n\w+", result.stdout)


async def test_a_terminal_resizes_and_its_control_keys_work(box):
    script = "trap 'stty size; exit 3' INT; stty size; while :; do sleep 0.01; done"
    await box.channel.start("op-t", ExecRequest(shell=script, tty=True, open_stdin=True))
    attachment = await box.channel.attach("op-t")
    assert (await anext(attachment)).data == b"24 80\r\n"
    await attachment.resize(50, 132)
    await attachment.write_stdin(b"\x03")
    streams, _, result = await gather_from(attachment)
    assert b"50 132" in streams[1]
    assert result.exit_code == 3


async def test_a_terminal_takes_utf8(box):
    result = await box.sh("stty -a | tr ';' '\\n'; printf 'ü'", tty=True)
    assert "ü".encode() in result.stdout
