"""Commands: their records, repeated ids, and sandboxes that end under them."""

from __future__ import annotations

import asyncio
import signal
import sqlite3

import pytest
from edge_node import request, until

from dsec.backends.protocol import ChannelEvent, OutputChunk, StreamEnd
from dsec.edge.output import kept_output
from dsec.trajectory.batch import Batch
from libdsec.errors import Conflict, InvalidArgument, NotFound, OutcomeUnknown, Overloaded, SandboxFailed
from libdsec.schema import ExecRequest, ExecResult, SessionRequest, SessionRunRequest, SignalRequest, UpdateRequest


def sh(text: str, **more) -> ExecRequest:
    return ExecRequest(shell=text, **more)


def runs(node, sandbox_id: str) -> list[str]:
    return node.host.guests[sandbox_id].runs


async def recorded(edge) -> None:
    await edge._core.journal.flush()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "argv"),
        ({"argv": ["true"], "shell": "true"}, "argv"),
        ({"argv": []}, "argv"),
        ({"argv": [""]}, "argv"),
        ({"argv": ["a\0b"]}, "argv"),
        ({"shell": "a\0b"}, "shell"),
        ({"argv": ["echo", "x" * (128 << 10)]}, "argv"),
        ({"argv": ["echo", "é" * (64 << 10)]}, "argv"),
        ({"argv": ["echo", *["x" * 100_000] * 21]}, "argv"),
        ({"argv": ["true"], "env": {"A=": ""}}, "env"),
        ({"argv": ["true"], "env": {"A": "\0"}}, "env"),
        ({"argv": ["true"], "cwd": "relative"}, "cwd"),
        ({"argv": ["true"], "cwd": "/a\0"}, "cwd"),
        ({"argv": ["true"], "user": "a b"}, "user"),
        ({"argv": ["true"], "timeout": 0.0}, "timeout"),
        ({"argv": ["true"], "timeout": float("nan")}, "timeout"),
        ({"argv": ["true"], "kill_grace": -1.0}, "kill_grace"),
        ({"argv": ["true"], "output_limit_bytes": -1}, "output_limit_bytes"),
        ({"argv": ["true"], "output_limit_bytes": 1 << 40}, "output_limit_bytes"),
        ({"argv": ["true"], "rlimits": {"nosuch": [1, 1]}}, "rlimits"),
        ({"argv": ["true"], "rlimits": {"nofile": [2, 1]}}, "rlimits"),
        ({"argv": ["true"], "op_id": "a/b"}, "op_id"),
        ({"argv": ["true"], "op_id": ".."}, "op_id"),
        ({"argv": ["true"], "op_id": "x" * 129}, "op_id"),
        ({"argv": ["true"], "tty": True, "rows": 0}, "rows"),
        ({"argv": ["true"], "stdin": b"", "open_stdin": True}, "stdin"),
    ],
)
async def test_bad_commands_are_refused_by_name(node, edge, sandbox, fields, field):
    with pytest.raises(InvalidArgument) as raised:
        await edge.exec(sandbox, ExecRequest(**fields))
    assert raised.value.field == field
    assert runs(node, sandbox) == []


async def test_the_largest_argument_that_linux_takes_passes(edge, sandbox):
    with pytest.raises(InvalidArgument, match="no such folder"):
        # The double refuses it: it came through the door.
        await edge.exec(sandbox, ExecRequest(argv=["bad"], env={"A": "x" * ((128 << 10) - 3)}))


async def test_a_repeated_id_runs_nothing(node, edge, sandbox):
    first = await edge.exec(sandbox, sh("echo hi", op_id="a"))
    unrecorded = await edge.exec(sandbox, sh("echo hi", op_id="a"))
    await recorded(edge)
    again = await edge.exec(sandbox, sh("echo hi", op_id="a"))
    assert not first.replayed
    assert unrecorded.replayed
    assert again.replayed
    assert first.stdout == unrecorded.stdout == again.stdout == b"hi\n"
    assert runs(node, sandbox) == ["a"]


async def test_a_repeated_id_waits_for_the_first(node, edge, sandbox):
    first = asyncio.ensure_future(edge.exec(sandbox, sh("hold", op_id="a")))
    await until(lambda: runs(node, sandbox))
    second = asyncio.ensure_future(edge.exec(sandbox, sh("hold", op_id="a")))
    await asyncio.sleep(0)
    node.backend.end(sandbox, "a", 7)
    assert (await first).exit_code == (await second).exit_code == 7
    assert second.result().replayed
    assert runs(node, sandbox) == ["a"]


async def test_an_id_of_another_request_is_a_conflict(edge, sandbox):
    await edge.exec(sandbox, sh("echo hi", op_id="a"))
    with pytest.raises(Conflict) as raised:
        await edge.exec(sandbox, sh("echo ho", op_id="a"))
    assert raised.value.field == "op_id"
    await recorded(edge)
    with pytest.raises(Conflict):
        await edge.start(sandbox, sh("echo ho", op_id="a"))


async def test_large_standard_input_tells_requests_apart(edge, sandbox):
    await edge.exec(sandbox, sh("exit 0", op_id="a", stdin=b"a" * 100_000))
    assert (await edge.exec(sandbox, sh("exit 0", op_id="a", stdin=b"a" * 100_000))).replayed
    with pytest.raises(Conflict):
        await edge.exec(sandbox, sh("exit 0", op_id="a", stdin=b"b" * 100_000))


async def test_what_was_refused_before_it_ran_leaves_its_id_free(edge, sandbox):
    with pytest.raises(InvalidArgument) as raised:
        await edge.exec(sandbox, sh("bad", op_id="a"))
    assert raised.value.ran == "not-run"
    await recorded(edge)
    with pytest.raises(InvalidArgument):
        await edge.exec(sandbox, sh("bad", op_id="a"))
    assert (await edge.exec(sandbox, sh("exit 3", op_id="a"))).exit_code == 3
    await recorded(edge)
    assert [process.op_id for process in await edge.processes(sandbox)] == ["a"]


async def test_leaving_does_not_end_the_command(node, edge, sandbox):
    call = asyncio.ensure_future(edge.exec(sandbox, sh("hold", op_id="a")))
    await until(lambda: runs(node, sandbox))
    call.cancel()
    await asyncio.wait([call])
    node.backend.end(sandbox, "a", 5, b"tail")
    result = await edge.result(sandbox, "a", wait=5)
    assert (result.exit_code, result.stdout, result.replayed) == (5, b"tail", True)


async def test_an_end_that_came_before_the_caller_left_is_collected(node, edge, sandbox):
    channel = edge._core.sandboxes[sandbox].channel
    told = asyncio.Event()

    async def stuck(op_id, request):
        channel._begin(op_id, "exit 4", request, background=False)
        told.set()
        await asyncio.Event().wait()

    channel.exec = stuck
    call = asyncio.ensure_future(edge.exec(sandbox, sh("exit 4", op_id="a")))
    await told.wait()
    call.cancel()
    await asyncio.wait([call])
    assert (await edge.result(sandbox, "a", wait=5)).exit_code == 4


async def test_a_result_is_acknowledged_only_when_it_is_on_record(node, edge, sandbox):
    await edge.exec(sandbox, sh("exit 0", op_id="a"))
    command = node.host.guests[sandbox].commands["a"]
    assert not command.acknowledged
    await until(lambda: command.acknowledged)
    assert edge._core.journal.op(sandbox, "a").state == "exited"


async def test_started_ones_are_waited_for(node, edge, sandbox):
    process = await edge.start(sandbox, sh("hold", op_id="a"))
    assert (process.state, process.pid, process.shell) == ("running", 42, "hold")
    with pytest.raises(Conflict) as raised:
        await edge.result(sandbox, "a")
    assert raised.value.cause == "running"
    node.backend.end(sandbox, "a", 0, b"out")
    assert (await edge.result(sandbox, "a", wait=5)).stdout == b"out"
    known = await edge.start(sandbox, sh("hold", op_id="a"))
    assert known.state == "exited"
    assert known.result.stdout == b""
    assert runs(node, sandbox) == ["a"]


async def test_the_log_is_in_the_order_of_the_requests(edge, sandbox):
    for number in range(5):
        await edge.exec(sandbox, sh(f"exit {number}"))
    await edge.start(sandbox, sh("hold"))
    listed = await edge.processes(sandbox)
    assert [process.shell for process in listed] == [*(f"exit {number}" for number in range(5)), "hold"]
    await recorded(edge)
    assert [row.seq for row in edge._core.journal.ops(sandbox)] == [1, 2, 3, 4, 5, 6]


async def test_signals_go_by_name_and_number(node, edge, sandbox):
    await edge.start(sandbox, sh("hold", op_id="a"))
    await edge.signal(sandbox, "a", SignalRequest(signal="sigterm"))
    assert (await edge.result(sandbox, "a", wait=5)).signal == signal.SIGTERM
    with pytest.raises(Conflict):
        await edge.signal(sandbox, "a", SignalRequest(signal=9))
    with pytest.raises(NotFound):
        await edge.signal(sandbox, "nosuch", SignalRequest(signal=9))
    with pytest.raises(InvalidArgument):
        await edge.signal(sandbox, "a", SignalRequest(signal="NOSUCH"))


async def test_a_command_whose_sandbox_is_stopped_is_told_so(node, edge, sandbox):
    call = asyncio.ensure_future(edge.exec(sandbox, sh("hold", op_id="a")))
    await until(lambda: runs(node, sandbox))
    await edge.stop(sandbox)
    with pytest.raises(SandboxFailed) as raised:
        await call
    assert raised.value.cause == "stopped"
    assert (await edge.process(sandbox, "a")).state == "lost"
    with pytest.raises(OutcomeUnknown):
        await edge.exec(sandbox, sh("hold", op_id="a"))


async def test_a_command_whose_sandbox_ran_out_of_memory_is_told_so(node, edge, sandbox):
    call = asyncio.ensure_future(edge.exec(sandbox, sh("hold")))
    await until(lambda: runs(node, sandbox))
    node.backend.on_event(sandbox, ChannelEvent("oom"))
    node.backend.kill(sandbox)
    node.backend.on_event(sandbox, ChannelEvent("init-died"))
    node.backend.on_event(sandbox, ChannelEvent("closed"))
    with pytest.raises(SandboxFailed) as raised:
        await call
    assert raised.value.cause == "oom"
    await until(lambda: sandbox not in node.host.guests)
    with pytest.raises(SandboxFailed) as raised:
        await edge.exec(sandbox, sh("exit 0"))
    assert (raised.value.cause, raised.value.ran) == ("oom", "not-run")


async def test_a_broken_conversation_of_a_live_sandbox_is_an_unknown_outcome(node, edge, sandbox, monkeypatch):
    monkeypatch.setattr("dsec.edge.operations.CAUSE_SECONDS", 0.01)
    channel = edge._core.sandboxes[sandbox].channel

    async def broken(op_id, request):
        channel._begin(op_id, "hold", request, background=False)
        raise SandboxFailed("reset by peer", cause="channel-closed")

    channel.exec = broken
    with pytest.raises(OutcomeUnknown):
        await edge.exec(sandbox, sh("hold", op_id="a"))
    assert (await edge.get(sandbox)).state == "running"
    node.backend.end(sandbox, "a", 6)
    assert (await edge.result(sandbox, "a", wait=5)).exit_code == 6


async def test_a_finished_result_that_nobody_fetched_is_kept_by_a_stop(node, edge, sandbox):
    await edge.start(sandbox, sh("hold", op_id="a"))
    # Its event was missed.
    report, node.backend.on_event = node.backend.on_event, lambda *_: None
    node.backend.end(sandbox, "a", 9)
    node.backend.on_event = report
    await edge.stop(sandbox)
    assert (await edge.result(sandbox, "a")).exit_code == 9


async def test_a_missed_end_is_found_by_the_sweep(node, edge, sandbox, monkeypatch):
    monkeypatch.setattr("dsec.edge.sweep.QUIET_SECONDS", -1)
    await edge.start(sandbox, sh("hold", op_id="a"))
    await edge.start(sandbox, sh("hold", op_id="gone"))
    report, node.backend.on_event = node.backend.on_event, lambda *_: None
    node.backend.end(sandbox, "a", 9)
    del node.host.guests[sandbox].commands["gone"]
    node.backend.on_event = report
    await edge._sweep.once()
    assert (await edge.result(sandbox, "a")).exit_code == 9
    with pytest.raises(OutcomeUnknown):
        await edge.result(sandbox, "gone")


async def test_use_wakes_a_paused_one(node, edge, sandbox):
    await edge.pause(sandbox)
    assert node.host.guests[sandbox].paused
    results = await asyncio.gather(*(edge.exec(sandbox, sh("exit 2")) for _ in range(5)))
    assert [result.exit_code for result in results] == [2] * 5
    assert (await edge.get(sandbox)).state == "running"


async def test_a_pause_that_fails_is_told_and_runs_on(node, edge, sandbox):
    node.backend.fail_pause = OSError(95, "Operation not supported")
    with pytest.raises(SandboxFailed, match="not supported"):
        await edge.pause(sandbox)
    assert (await edge.exec(sandbox, sh("exit 0"))).exit_code == 0


async def test_stops_agree_and_wait_for_each_other(node, edge, sandbox):
    node.backend.destroy_gate = asyncio.Event()
    both = [asyncio.ensure_future(edge.stop(sandbox)) for _ in range(2)]
    await until(lambda: edge._core.sandboxes[sandbox].status.state == "stopping")
    with pytest.raises(Conflict) as raised:
        await edge.exec(sandbox, sh("exit 0"))
    assert raised.value.cause == "stopping"
    node.backend.destroy_gate.set()
    first, second = await asyncio.gather(*both)
    third = await edge.stop(sandbox)
    assert first == second == third
    with pytest.raises(Conflict) as raised:
        await edge.exec(sandbox, sh("exit 0"))
    assert raised.value.cause == "stopped"


async def test_a_stop_whose_caller_leaves_goes_on(node, edge, sandbox):
    node.backend.destroy_gate = asyncio.Event()
    call = asyncio.ensure_future(edge.stop(sandbox))
    await until(lambda: edge._core.sandboxes[sandbox].status.state == "stopping")
    call.cancel()
    await asyncio.wait([call])
    node.backend.destroy_gate.set()
    await until(lambda: sandbox not in node.host.guests)


async def test_what_could_not_be_removed_is_told_and_tried_again(node, edge, sandbox):
    node.backend.fail_destroy = 1
    info = await edge.stop(sandbox)
    assert info.state == "stopping"
    assert "busy" in info.detail
    await edge._sweep.once()
    await until(lambda: sandbox not in node.host.guests)
    assert (await edge.stop(sandbox)).state == "stopped"


async def test_all_are_stopped_though_removals_fail_at_first(node, edge):
    made = (await edge.create(request(count=3))).sandboxes
    node.backend.fail_destroy = 7
    assert await edge.stop_all(30) == 0
    assert node.host.guests == {}
    assert [(await edge.get(info.sandbox_id)).state for info in made] == ["stopped"] * 3


async def test_what_cannot_be_removed_is_counted_when_all_have_to_go(node, edge, sandbox):
    node.backend.fail_destroy = 10_000
    assert await edge.stop_all(0.2) == 1
    node.backend.fail_destroy = 0
    assert await edge.stop_all(30) == 0


async def test_nobody_is_found_by_a_wrong_id(edge):
    for call in (edge.get, edge.stop, edge.pause, edge.resume, edge.processes, edge.sessions):
        with pytest.raises(NotFound):
            await call("sb-local-nosuch")
    with pytest.raises(NotFound):
        await edge.exec("sb-local-nosuch", sh("exit 0"))


async def test_too_many_at_once_are_refused(node):
    edge = await node.open(running_ops_per_sandbox=2)
    sandbox = (await edge.create(request())).sandboxes[0].sandbox_id
    for _ in range(2):
        await edge.start(sandbox, sh("hold"))
    with pytest.raises(Overloaded) as raised:
        await edge.start(sandbox, sh("hold"))
    assert raised.value.ran == "not-run"


async def test_idle_sandboxes_stop_and_busy_ones_do_not(node, edge):
    idle, busy, service = (info.sandbox_id for info in (await edge.create(request(3, ttl_running_stop=0.1))).sandboxes)
    await edge.start(busy, sh("hold", op_id="a"))
    await edge.start(service, sh("hold", background=True))
    await until(lambda: set(node.host.guests) == {busy})
    assert (await edge.get(idle)).stop_reason == (await edge.get(service)).stop_reason == "idle"
    with edge.hold(busy):
        node.backend.end(busy, "a")
        await edge.result(busy, "a", wait=5)
        assert edge._core.sandboxes[busy].machine.deadline() is None
    await until(lambda: not node.host.guests)


async def test_a_renewal_holds(node, edge):
    kept = (await edge.create(request(ttl_running_stop=0.2, ttl_max=1000.0))).sandboxes[0].sandbox_id
    info = await edge.update(kept, UpdateRequest(ttl_running_stop=-1, labels={"a": "b"}))
    assert info.labels == {"a": "b"}
    status = edge._core.sandboxes[kept].status
    assert (status.ttl_running_stop, status.ttl_max) == (None, 1000.0)
    with pytest.raises(InvalidArgument):
        await edge.update(kept, UpdateRequest(ttl_max=-5))


async def test_the_hard_limit_stops_a_busy_one(node, edge):
    busy = (await edge.create(request(ttl_max=0.1))).sandboxes[0].sandbox_id
    await edge.start(busy, sh("hold"))
    await until(lambda: not node.host.guests)
    assert (await edge.get(busy)).stop_reason == "ttl-max"


async def test_sessions_are_named_and_their_commands_recorded(node, edge, sandbox):
    session = await edge.open_session(sandbox, SessionRequest(cwd="/tmp"))
    run = SessionRunRequest(shell="echo hi", op_id="a")
    assert (await edge.run_in_session(sandbox, session.session_id, run)).stdout == b"hi\n"
    assert (await edge.run_in_session(sandbox, session.session_id, run)).replayed
    assert (await edge.process(sandbox, "a")).session_id == session.session_id
    await edge.close_session(sandbox, session.session_id)
    await edge.close_session(sandbox, session.session_id)
    await recorded(edge)
    assert [info.state for info in await edge.sessions(sandbox)] == ["closed"]
    with pytest.raises(Conflict, match="closed"):
        await edge.run_in_session(sandbox, session.session_id, SessionRunRequest(shell="echo hi"))
    with pytest.raises(NotFound):
        await edge.run_in_session(sandbox, "ss-nosuch", SessionRunRequest(shell="echo hi"))


async def test_a_repeated_session_id_opens_no_other(node, edge, sandbox):
    asked = SessionRequest(cwd="/tmp", session_id="mine")
    first, second = await asyncio.gather(edge.open_session(sandbox, asked), edge.open_session(sandbox, asked))
    assert first == second == await edge.open_session(sandbox, asked)
    assert node.host.guests[sandbox].shells == {"mine"}
    with pytest.raises(Conflict) as raised:
        await edge.open_session(sandbox, SessionRequest(session_id="mine"))
    assert (raised.value.field, raised.value.cause) == ("session_id", "session-id-reused")
    await edge.close_session(sandbox, "mine")
    assert (await edge.open_session(sandbox, asked)).state == "closed"
    with pytest.raises(InvalidArgument) as invalid:
        await edge.open_session(sandbox, SessionRequest(session_id="a/b"))
    assert invalid.value.field == "session_id"


async def test_a_session_id_is_its_sandboxs_own(node, edge, sandbox):
    other = (await edge.create(request())).sandboxes[0].sandbox_id
    asked = SessionRequest(session_id="main")
    await asyncio.gather(edge.open_session(sandbox, asked), edge.open_session(other, asked))
    assert node.host.guests[sandbox].shells == node.host.guests[other].shells == {"main"}
    await edge.stop(sandbox)
    assert [info.state for info in await edge.sessions(other)] == ["open"]
    third = (await edge.create(request())).sandboxes[0].sandbox_id
    assert (await edge.open_session(third, asked)).sandbox_id == third


async def test_a_session_whose_caller_left_is_gone_before_its_id_opens_another(node, edge, sandbox, monkeypatch):
    channel = type(edge._core.sandboxes[sandbox].channel)
    opening, closing = channel.open_session, channel.close_session
    begun, gate = asyncio.Event(), asyncio.Event()

    async def open_and_stall(self, session_id, request):
        await opening(self, session_id, request)
        begun.set()
        await asyncio.Event().wait()

    async def close_late(self, session_id):
        await gate.wait()
        await closing(self, session_id)

    monkeypatch.setattr(channel, "open_session", open_and_stall)
    monkeypatch.setattr(channel, "close_session", close_late)
    call = asyncio.ensure_future(edge.open_session(sandbox, SessionRequest(session_id="mine")))
    await begun.wait()
    call.cancel()
    await asyncio.wait([call])
    monkeypatch.setattr(channel, "open_session", opening)
    again = asyncio.ensure_future(edge.open_session(sandbox, SessionRequest(session_id="mine")))
    await asyncio.sleep(0)
    assert node.host.guests[sandbox].shells == {"mine"}
    gate.set()
    assert (await again).state == "open"
    assert node.host.guests[sandbox].shells == {"mine"}


async def test_leaving_a_sessions_command_does_not_lose_its_result(node, edge, sandbox):
    session = await edge.open_session(sandbox, SessionRequest())
    call = asyncio.ensure_future(edge.run_in_session(sandbox, session.session_id, SessionRunRequest(shell="hold", op_id="a")))
    await until(lambda: runs(node, sandbox))
    call.cancel()
    await asyncio.wait([call])
    node.backend.end(sandbox, "a", 8)
    assert (await edge.result(sandbox, "a", wait=5)).exit_code == 8


async def test_records_outlive_their_sandbox(edge, sandbox):
    await edge.exec(sandbox, sh("echo hi", op_id="a"))
    await edge.stop(sandbox)
    assert (await edge.result(sandbox, "a")).stdout == b"hi\n"
    assert (await edge.exec(sandbox, sh("echo hi", op_id="a"))).replayed
    assert [process.state for process in await edge.processes(sandbox)] == ["exited"]


async def test_output_that_the_journal_dropped_counts_as_dropped(edge, sandbox):
    await edge.exec(sandbox, sh("echo hello", op_id="a"))
    await recorded(edge)
    await edge._core.journal.run(lambda db: db.execute("UPDATE ops SET stdout=NULL, stderr=NULL").rowcount)
    result = await edge.result(sandbox, "a")
    assert (result.exit_code, result.stdout, result.stdout_bytes, result.stdout_dropped) == (0, b"", 6, 6)
    assert (await edge.output(sandbox, "a", 1)).data == b""


async def test_an_ended_command_is_attached_to_by_its_record(edge, sandbox):
    await edge.exec(sandbox, sh("echo hello", op_id="a"))
    await edge.stop(sandbox)
    attachment = await edge.attach(sandbox, "a", stdout_offset=2)
    items = [item async for item in attachment]
    assert items[:3] == [OutputChunk(1, 2, b"llo\n"), StreamEnd(1), StreamEnd(2)]
    assert (items[3].exit_code, items[3].stdout) == (0, b"")
    with pytest.raises(Conflict):
        await attachment.write_stdin(b"x")


def test_kept_output_tells_its_gap():
    result = ExecResult(op_id="a", exit_code=0, stdout=b"headtail", stdout_bytes=108, stdout_dropped=100)
    head = kept_output(result, 1, 0, 3)
    assert (head.data, head.next_offset, head.gap, head.eof) == (b"hea", 3, 0, False)
    rest = kept_output(result, 1, 3, 100)
    assert (rest.data, rest.next_offset, rest.eof) == (b"d", 4, False)
    tail = kept_output(result, 1, 4, 100)
    assert (tail.data, tail.offset, tail.gap, tail.next_offset, tail.eof) == (b"tail", 104, 100, 108, True)
    within = kept_output(result, 1, 50, 100)
    assert (within.offset, within.gap) == (104, 54)
    assert kept_output(result, 2, 0, 10).eof


async def test_what_a_full_disk_did_not_keep_from_being_done_is_told_as_done(node, edge, sandbox, monkeypatch):
    session = (await edge.open_session(sandbox, SessionRequest())).session_id
    await edge._core.journal.flush()
    write, full = Batch.write, True

    def refusing(batch, db):
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        write(batch, db)

    monkeypatch.setattr(Batch, "write", refusing)
    calls = (
        lambda: edge.close_session(sandbox, session),
        lambda: edge.update(sandbox, UpdateRequest(ttl_max=1000.0)),
        lambda: edge.pause(sandbox),
        lambda: edge.stop(sandbox),
    )
    for call in calls:
        with pytest.raises(Overloaded, match="the journal cannot be written") as raised:
            await call()
        assert (raised.value.ran, raised.value.cause) == ("ran", "journal")
    assert node.host.guests == {}
    with pytest.raises(Overloaded) as raised:
        await edge.create(request())
    assert raised.value.ran == "not-run"
    full = False
