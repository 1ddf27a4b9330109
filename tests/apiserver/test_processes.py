"""Processes and sessions through the SDK: streams, input, signals, waiting, credit."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from polling import until

from libdsec import (
    CommandFailed,
    Conflict,
    ConnectionFailed,
    DSecClient,
    DSecContainerRunArgs,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    streaming,
)
from libdsec.stream import ProcessStream, kept_from


@pytest.fixture
async def sandbox(served):
    async with DSecClient(served.url) as client:
        async with await client.run_container(DSecContainerRunArgs(container_image="debian")) as made:
            yield made


async def gathered(pieces):
    found = {1: [], 2: []}
    async for stream, data in pieces:
        found[stream].append(data)
    return b"".join(found[1]), b"".join(found[2])


async def test_output_comes_whole_and_apart(sandbox):
    process = await sandbox.start(shell="printf 'a\\000\\n\\n'; printf 'b' >&2; sleep 0.05; printf 'c'; exit 7")
    assert await gathered(process.output()) == (b"a\0\n\nc", b"b")
    result = await process.wait()
    assert (result.exit_code, result.stdout, result.ok) == (7, b"a\0\n\nc", False)
    assert (await process.info()).state == "exited"
    await process.aclose()


async def test_check_makes_an_exit_an_error_only_when_asked(sandbox):
    assert (await sandbox.run_shell("true")).check().ok
    result = await sandbox.run_shell("echo why >&2; exit 3")
    with pytest.raises(CommandFailed, match="exited with 3: why") as caught:
        result.check()
    assert caught.value.ran == "ran"
    assert (await sandbox.run_shell("kill -9 $$")).signal == 9


async def test_a_character_cut_in_two_comes_whole(sandbox):
    process = await sandbox.start(shell="printf '\\342'; sleep 0.05; printf '\\202\\254\\377'")
    text = "".join([piece async for _, piece in process.output_text()])
    assert text == "€\ufffd"
    await process.aclose()


async def test_input_reaches_a_process_and_ends(sandbox):
    process = await sandbox.start(["cat"], open_stdin=True)
    await process.write_stdin("one\n")
    await process.write_stdin(b"two\n")
    await process.close_stdin()
    await process.close_stdin()
    assert await gathered(process.output()) == (b"one\ntwo\n", b"")
    with pytest.raises(Conflict):
        await process.write_stdin(b"late")
    await process.aclose()


async def test_a_filter_of_megabytes_does_not_lock_up(sandbox):
    data = b"0123456789abcdef" * (20 << 16)
    async with await sandbox.start(["cat"], open_stdin=True) as process:

        async def feed():
            await process.write_stdin(data)
            await process.close_stdin()

        feeding = asyncio.ensure_future(feed())
        stdout, _ = await gathered(process.output())
        await feeding
    assert stdout == data


async def test_a_process_that_closed_its_input_is_no_error(sandbox):
    process = await sandbox.start(["sh", "-c", "exec <&-; sleep 0.1; echo done"], open_stdin=True)
    for _ in range(30):
        await process.write_stdin(b"x" * 100_000)
    assert await gathered(process.output()) == (b"done\n", b"")
    await process.aclose()


async def test_what_is_not_read_stays_within_the_credit(served, sandbox):
    process = await sandbox.start(["sh", "-c", "yes | head -c 3000000"])
    credit = 256 << 10
    async with process.attach(credit=credit) as stream:
        waiting = lambda: sum(len(data) for _, data in stream._pieces)  # noqa: E731
        await until(lambda: waiting() == credit)
        # Another reader of the same process is not held up by the one that stands.
        async with process.attach() as other:
            assert len((await gathered(other))[0]) == 3_000_000
        assert waiting() == credit
        assert served.edge.attachments[0].credit[1] == 0
        assert len((await gathered(stream))[0]) == 3_000_000
        assert stream.result.exit_code == 0


async def test_a_stream_begins_where_it_is_asked_to(sandbox):
    process = await sandbox.start(["printf", "0123456789"])
    await process.wait()
    async with process.attach(stdout_offset=4) as stream:
        assert await gathered(stream) == (b"456789", b"")
    piece = await process.kept_output(offset=8)
    assert (piece.data, piece.next_offset, piece.eof) == (b"89", 10, True)


async def test_signals_by_name_and_number(sandbox):
    process = await sandbox.start(["sleep", "100"])
    await process.signal("SIGTERM")
    assert (await process.wait()).signal == 15
    with pytest.raises(Conflict):
        await process.signal(9)
    with pytest.raises(InvalidArgument) as caught:
        await process.signal("NOSUCH")
    assert caught.value.field == "signal"
    async with await sandbox.start(["sleep", "100"]) as second:
        async with second.attach() as stream:
            await stream.signal("KILL")
            await gathered(stream)
            assert stream.result.signal == 9


async def test_leaving_the_block_ends_the_process(sandbox):
    async with await sandbox.start(["sleep", "100"]) as process:
        pass
    assert (await process.wait(5)).signal == 9


async def test_waiting_has_an_end(sandbox):
    async with await sandbox.start(["sleep", "100"]) as process:
        with pytest.raises(OutcomeUnknown) as caught:
            await process.wait(0.05)
        assert caught.value.cause == "timeout"
        with pytest.raises(Conflict) as running:
            await sandbox.result(process.op_id)
        assert running.value.cause == "running"


async def test_the_same_id_runs_once(served, sandbox):
    first = await sandbox.run_shell("echo $$", op_id="mine")
    again = await sandbox.run_shell("echo $$", op_id="mine")
    assert first.stdout == again.stdout
    assert served.edge.runs == 1
    assert (await (await sandbox.process("mine")).wait()).stdout == first.stdout


async def test_what_is_not_known_is_not_found(sandbox):
    with pytest.raises(NotFound):
        await sandbox.process("nothing")
    process = await sandbox.start(["true"])
    process._path = process._path.replace(process.op_id, "nothing")
    with pytest.raises(NotFound):
        await gathered(process.output())


async def test_a_terminal_is_resized(served, sandbox):
    async with await sandbox.start(["sleep", "100"], tty=True, rows=30, cols=90) as process:
        await process.resize(50, 132)
        await until(lambda: served.edge.commands[process.op_id].rows == (50, 132))
        with pytest.raises(InvalidArgument):
            await process.resize(0, 10)


async def test_a_session_keeps_its_folder_and_variables(sandbox, tmp_path):
    async with await sandbox.open_session(cwd="/") as session:
        assert (await session.run(f"cd {tmp_path}; x=5")).ok
        assert (await session.run("echo $PWD $x; exit_code() { return 4; }; exit_code")).stdout == f"{tmp_path} 5\n".encode()
        assert [each.session_id for each in await sandbox.sessions()] == [session.session_id]
    assert await sandbox.sessions() == []
    await session.close()
    with pytest.raises(NotFound):
        await sandbox.session(session.session_id)


async def test_a_session_whose_answer_was_lost_is_asked_for_again(served, sandbox, monkeypatch):
    lost = []
    call = type(sandbox._api.transport).call

    async def lose_first(self, method, target, **options):
        reply = await call(self, method, target, **options)
        if target.endswith("/sessions") and not lost:
            lost.append(reply)
            raise ConnectionFailed("the answer was lost", ran="unknown", cause="broken")
        return reply

    monkeypatch.setattr(type(sandbox._api.transport), "call", lose_first)
    async with await sandbox.open_session() as session:
        assert len(lost) == 1
        assert list(served.edge.open_sessions) == [session.session_id]
        assert (await sandbox.open_session(session_id=session.session_id)).session_id == session.session_id
        assert list(served.edge.open_sessions) == [session.session_id]


async def test_a_malformed_message_ends_the_stream_with_its_reason(served, sandbox):
    process = await sandbox.start(["sleep", "100"])
    stream = ProcessStream(sandbox._api, process._path)
    async with stream:
        await stream._socket.send(bytes([streaming.CREDIT, 9]))
        with pytest.raises(InvalidArgument) as caught:
            await gathered(stream)
    assert caught.value.field == "credit"
    await until(lambda: all(each.closed for each in served.edge.attachments))
    await process.kill()


async def test_more_input_than_granted_is_refused(served, sandbox):
    process = await sandbox.start(["sleep", "100"], open_stdin=True)
    async with process.attach() as stream:
        with contextlib.suppress(ConnectionFailed):
            for _ in range(12):
                await stream._socket.send(bytes([streaming.STDIN]) + bytes(256 << 10))
        with pytest.raises(InvalidArgument) as caught:
            await gathered(stream)
    assert caught.value.field == "stdin"
    await process.kill()


async def test_a_started_process_keeps_its_output_for_who_comes_at_once(served, sandbox):
    process = await sandbox.start(["cat"], open_stdin=True)
    (held,) = served.edge.attachments
    assert (held.credit[1], held.closed) == (0, False)
    await process.write_stdin(b"x")
    assert served.edge.attachments == [held]
    await process.close_stdin()
    assert await gathered(process.output()) == (b"x", b"")
    await process.aclose()
    await until(lambda: held.closed)


async def test_who_waits_for_the_result_needs_no_stream(served, sandbox):
    process = await sandbox.start(["sleep", "0.1"])
    assert (await process.wait()).ok
    await until(lambda: served.edge.attachments[0].closed)
    await sandbox.start(["sleep", "0.1"], background=True)
    assert len(served.edge.attachments) == 1


async def test_a_hold_has_an_end(served, sandbox, monkeypatch):
    monkeypatch.setattr("libdsec.sandbox._HOLD_SECONDS", 0.05)
    process = await sandbox.start(["sleep", "100"])
    await until(lambda: served.edge.attachments[0].closed)
    await process.kill()


class BrokenOff:
    """A view that ends in good order and says nothing of how the command ended."""

    def __init__(self, inner, pieces: int) -> None:
        self.inner = inner
        self.pieces = pieces
        self.consumed = inner.consumed
        self.aclose = inner.aclose

    async def __aiter__(self):
        items = self.inner.__aiter__()
        for _ in range(self.pieces):
            yield await anext(items)
        await items.aclose()


def break_off(served, monkeypatch, pieces: int) -> list[BrokenOff]:
    """All views from now on break off after so many pieces."""
    attach, views = served.edge.attach, []

    async def broken(*args, **options):
        views.append(BrokenOff(await attach(*args, **options), pieces))
        return views[-1]

    monkeypatch.setattr(served.edge, "attach", broken)
    return views


@pytest.mark.parametrize("pieces", [0, 1])
async def test_a_stream_that_never_tells_the_end_is_finished_from_the_record(served, sandbox, monkeypatch, pieces):
    process = await sandbox.start(shell="printf out; printf err >&2; exit 3")
    await process.wait()
    views = break_off(served, monkeypatch, pieces)
    async with process.attach(stdout_offset=1) as stream:
        assert await gathered(stream) == (b"ut", b"err")
    assert (stream.result.exit_code, stream.result.stdout, stream.dropped) == (3, b"", {1: 0, 2: 0})
    assert len(views) <= 4


async def test_a_stream_of_a_running_process_that_always_breaks_off_says_so(served, sandbox, monkeypatch):
    async with await sandbox.start(["sleep", "100"], background=True) as process:
        break_off(served, monkeypatch, 0)
        async with process.attach() as stream:
            with pytest.raises(OutcomeUnknown) as caught:
                await asyncio.wait_for(gathered(stream), 5)
    assert (caught.value.cause, caught.value.ran) == ("detached", "unknown")


def test_a_record_is_read_on_from_any_offset():
    assert list(kept_from(b"headtail", 8, 6)) == [(6, b"il")]
    assert list(kept_from(b"headtail", 108, 2)) == [(2, b"ad"), (104, b"tail")]
    assert list(kept_from(b"headtail", 108, 50)) == [(104, b"tail")]
    assert list(kept_from(b"headtail", 108, 106)) == [(106, b"il")]
    assert list(kept_from(b"", 108, 0)) == []


async def test_a_stream_whose_closing_is_cancelled_keeps_no_connection(sandbox):
    connections = sandbox._api.transport._open().connector._acquired
    async with await sandbox.start(["sleep", "100"]) as process:
        async with process.attach() as stream:
            assert len(connections) == 1
            # The stream's own reader waits for a message: closing waits for it first.
            closing = asyncio.ensure_future(stream._socket.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            assert not connections
            stream._reader.cancel()


async def test_a_stream_that_ended_and_is_not_closed_keeps_no_connection(sandbox):
    connections = sandbox._api.transport._open().connector._acquired
    process = await sandbox.start(["echo", "hi"])
    assert await gathered(process.output()) == (b"hi\n", b"")
    await until(lambda: not connections)
    process._stream = None
    process._path = process._path.replace(process.op_id, "nothing")
    with pytest.raises(NotFound):
        await gathered(process.output())
    await until(lambda: not connections)


async def test_a_stream_that_is_open_when_its_client_is_closed_ends_with_it(served):
    client = await DSecClient(served.url).open()
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian"))
    process = await sandbox.start(["sleep", "100"])
    stream = await process.attach().open()
    await client.aclose()
    with pytest.raises(Conflict) as caught:
        await asyncio.wait_for(gathered(stream), 5)
    assert caught.value.cause == "closed"
    assert client._transport._session is None
    with pytest.raises(Conflict, match="closed"):
        await client.list()
    served.edge.commands[process.op_id].process.kill()
