"""Edges that come and go over sandboxes that stay."""

from __future__ import annotations

import asyncio

import pytest
from edge_node import request, until

from dsec.backends.protocol import ChannelEvent
from libdsec.errors import Conflict, OutcomeUnknown, SandboxFailed
from libdsec.schema import ExecRequest, SessionRequest, SessionRunRequest


def sh(text: str, **more) -> ExecRequest:
    return ExecRequest(shell=text, **more)


async def test_two_edges_never_share_a_run_folder(node, edge):
    with pytest.raises(Conflict, match="pid"):
        await node.edge().open()
    node.edges.pop()
    await node.close(edge)
    assert (await (await node.open()).node_info()).sandboxes == 0


async def test_sandboxes_and_records_are_there_again(node, edge, sandbox):
    await edge.exec(sandbox, sh("echo hi", op_id="a"))
    await edge.start(sandbox, sh("hold", op_id="b"))
    await node.close(edge)
    edge = await node.open()
    assert [info.state for info in await edge.list()] == ["running"]
    assert (await edge.exec(sandbox, sh("echo hi", op_id="a"))).replayed
    node.backend.end(sandbox, "b", 3)
    assert (await edge.result(sandbox, "b", wait=5)).exit_code == 3
    await edge.exec(sandbox, sh("exit 0", op_id="c"))
    await edge._core.journal.flush()
    assert [(row.op_id, row.seq) for row in edge._core.journal.ops(sandbox)] == [("a", 1), ("b", 2), ("c", 3)]


async def test_ends_while_it_was_away_are_collected(node, edge, sandbox):
    await edge.start(sandbox, sh("hold", op_id="a"))
    await edge._core.journal.flush()
    await node.crash(edge)
    edge = node.edge()
    node.backend.end(sandbox, "a", 4, b"out")
    await edge.open()
    result = await edge.result(sandbox, "a")
    assert (result.exit_code, result.stdout) == (4, b"out")
    await until(lambda: node.host.guests[sandbox].commands["a"].acknowledged)


async def test_what_ran_and_never_reached_the_journal_is_found_in_the_sandbox(node, edge, sandbox):
    node.freeze_journal(edge)
    await edge.start(sandbox, sh("hold", op_id="running"))
    await edge.start(sandbox, sh("hold", op_id="ended"))
    node.backend.end(sandbox, "ended", 5)
    await node.crash(edge)
    edge = await node.open()
    assert (await edge.result(sandbox, "ended", wait=5)).exit_code == 5
    assert {process.op_id: process.state for process in await edge.processes(sandbox)}["running"] == "running"
    assert (await edge.exec(sandbox, sh("hold", op_id="ended"))).replayed
    assert node.host.guests[sandbox].runs == ["running", "ended"]


async def test_a_recorded_result_that_was_not_acknowledged_is_forgotten_now(node, edge, sandbox):
    async def deaf(session_id, op_id):
        raise SandboxFailed("reset", cause="channel-closed")

    edge._core.sandboxes[sandbox].channel.acknowledge = deaf
    await edge.exec(sandbox, sh("exit 0", op_id="a"))
    await edge._core.journal.flush()
    await node.crash(edge)
    edge = await node.open()
    await until(lambda: node.host.guests[sandbox].commands["a"].acknowledged)
    assert [process.op_id for process in await edge.processes(sandbox)] == ["a"]


async def test_an_end_during_the_adoption_is_not_missed(node, edge, sandbox):
    await edge.start(sandbox, sh("hold", op_id="a"))
    node.freeze_journal(edge)
    await edge.start(sandbox, sh("hold", op_id="unrecorded"))
    await node.crash(edge)
    edge = node.edge()
    backend = node.backend
    adopt = backend.adopt

    async def adopt_then_end(spec):
        channel = await adopt(spec)
        listing = channel.sessions

        async def listed_then_ended():
            # The listing was made before they ended, and arrives after the events.
            listed = await listing()
            backend.end(sandbox, "a", 1)
            backend.end(sandbox, "unrecorded", 2)
            return listed

        channel.sessions = listed_then_ended
        return channel

    backend.adopt = adopt_then_end
    await edge.open()
    assert (await edge.result(sandbox, "a", wait=5)).exit_code == 1
    assert (await edge.result(sandbox, "unrecorded", wait=5)).exit_code == 2


async def test_what_its_sandbox_does_not_know_any_more_is_lost(node, edge, sandbox):
    await edge.start(sandbox, sh("hold", op_id="a"))
    await edge._core.journal.flush()
    await node.crash(edge)
    del node.host.guests[sandbox].commands["a"]
    edge = await node.open()
    with pytest.raises(OutcomeUnknown):
        await edge.result(sandbox, "a")


async def test_dead_sandboxes_are_failed_and_removed(node, edge, sandbox):
    await edge.start(sandbox, sh("hold", op_id="a"))
    await edge._core.journal.flush()
    await node.crash(edge)
    node.host.guests[sandbox].alive = False
    edge = await node.open()
    await until(lambda: sandbox not in node.host.guests)
    info = await edge.get(sandbox)
    assert (info.state, info.cause) == ("failed", "channel-closed")
    with pytest.raises(OutcomeUnknown):
        await edge.result(sandbox, "a")


async def test_after_a_reboot_the_node_was_lost(node, edge, sandbox, monkeypatch):
    await node.crash(edge)
    node.host.guests.clear()
    monkeypatch.setattr("dsec.edge.recovery._boot_id", lambda: "another")
    edge = await node.open()
    assert (await edge.get(sandbox)).cause == "node-lost"


async def test_what_nobody_was_told_of_is_removed(node, edge):
    backend = node.backend
    backend.create_gate = asyncio.Event()
    creating = asyncio.ensure_future(edge.create(request(), "key"))
    await until(lambda: backend.launching)
    backend.create_gate.set()
    # It is made, and the edge dies before that is on record.
    node.freeze_journal(edge)
    await until(lambda: node.host.guests)
    await node.crash(edge)
    creating.cancel()
    await asyncio.wait([creating])
    edge = await node.open()
    await until(lambda: not node.host.guests)
    assert [info.state for info in await edge.list()] == ["stopped"]
    assert len((await edge.create(request(), "key")).sandboxes) == 1


async def test_a_key_survives(node, edge):
    first = await edge.create(request(count=2), "key")
    await node.crash(edge)
    edge = await node.open()
    again = await edge.create(request(count=2), "key")
    assert [info.sandbox_id for info in again.sandboxes] == [info.sandbox_id for info in first.sandboxes]


async def test_an_interrupted_stop_is_finished(node, edge, sandbox):
    backend = node.backend
    backend.destroy_gate = asyncio.Event()
    call = asyncio.ensure_future(edge.stop(sandbox))
    await until(lambda: edge._core.sandboxes[sandbox].status.state == "stopping")
    await edge._core.journal.flush()
    await node.crash(edge)
    call.cancel()
    edge = await node.open()
    await until(lambda: not node.host.guests)
    info = await edge.stop(sandbox)
    assert (info.state, info.stop_reason) == ("stopped", "requested")


async def test_what_no_record_knows_is_removed(node, edge, sandbox):
    await node.close(edge)
    (node.path / "state/edge.db").rename(node.path / "lost.db")
    for name in ("edge.db-wal", "edge.db-shm"):
        (node.path / "state" / name).unlink(missing_ok=True)
    edge = await node.open()
    assert node.host.guests == {}
    assert edge.metrics()["swept_total"] == 1


async def test_what_is_being_made_is_not_unknown(node, edge):
    backend = node.backend
    backend.create_gate = asyncio.Event()
    creating = asyncio.ensure_future(edge.create(request()))
    await until(lambda: backend.launching)

    async def owned():
        return set(edge._core.sandboxes)

    backend.owned = owned
    removed = []

    async def remove(sandbox_id):
        removed.append(sandbox_id)

    backend.destroy_unknown = remove
    await edge._sweep.once()
    backend.create_gate.set()
    await creating
    assert removed == []


async def test_a_paused_one_stays_paused_and_its_clock_stands(node, edge):
    sandbox = (await edge.create(request(ttl_running_stop=100.0))).sandboxes[0].sandbox_id
    await edge.pause(sandbox)
    await node.close(edge)
    edge = await node.open()
    info = await edge.get(sandbox)
    assert info.state == "paused"
    assert info.idle_seconds < 5
    assert (await edge.exec(sandbox, sh("exit 0"))).exit_code == 0


async def test_idle_time_goes_on_but_nobody_is_found_idle_at_once(node, edge):
    sandbox = (await edge.create(request(ttl_running_stop=3600.0))).sandboxes[0].sandbox_id
    await node.close(edge)
    edge = await node.open(restart_grace_seconds=1e9)
    status = edge._core.sandboxes[sandbox].status
    before = status.idle_since
    await node.close(edge)
    edge = await node.open(restart_grace_seconds=10.0)
    assert edge._core.sandboxes[sandbox].status.idle_since <= before
    machine = edge._core.sandboxes[sandbox].machine
    assert machine.deadline() == pytest.approx(before + 3600, abs=5)


async def test_sessions_are_open_still(node, edge, sandbox):
    session = await edge.open_session(sandbox, SessionRequest())
    call = asyncio.ensure_future(edge.run_in_session(sandbox, session.session_id, SessionRunRequest(shell="hold", op_id="a")))
    await until(lambda: node.host.guests[sandbox].runs)
    await edge._core.journal.flush()
    call.cancel()
    await node.crash(edge)
    edge = await node.open()
    assert [info.state for info in await edge.sessions(sandbox)] == ["open"]
    node.backend.end(sandbox, "a", 6)
    assert (await edge.result(sandbox, "a", wait=5)).exit_code == 6
    result = await edge.run_in_session(sandbox, session.session_id, SessionRunRequest(shell="exit 1"))
    assert result.exit_code == 1


async def test_a_closed_channel_fails_it_with_its_story(node, edge, sandbox):
    node.backend.kill(sandbox)
    node.backend.on_event(sandbox, ChannelEvent("closed", "aether was killed"))
    await until(lambda: sandbox not in node.host.guests)
    info = await edge.get(sandbox)
    assert (info.state, info.cause, info.detail) == ("failed", "channel-closed", "aether was killed")
    assert [line.event for line in info.story] == ["launched", "lost", "destroyed"]


async def test_a_backend_that_cannot_adopt_one_holds_up_no_other(node, edge, sandbox):
    other = (await edge.create(request())).sandboxes[0].sandbox_id
    await node.crash(edge)
    edge = node.edge()
    adopt = node.backend.adopt

    async def picky(spec):
        if spec.sandbox_id == sandbox:
            raise OSError(5, "Input/output error")
        return await adopt(spec)

    node.backend.adopt = picky
    await edge.open()
    assert {info.sandbox_id: info.state for info in await edge.list()} == {sandbox: "failed", other: "running"}


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_killed_half_way_through_a_pause_it_runs_again(node, edge, sandbox, verb):
    """Frozen or not, the journal knew that it might be either."""
    backend = node.backend
    if verb == "resume":
        await edge.pause(sandbox)
    reached, inner = asyncio.Event(), getattr(backend, verb)

    async def done_but_not_told(spec):
        await inner(spec)
        reached.set()
        await asyncio.Event().wait()

    setattr(backend, verb, done_but_not_told)
    call = asyncio.ensure_future(getattr(edge, verb)(sandbox))
    await reached.wait()
    await node.crash(edge)
    call.cancel()
    edge = await node.open()
    assert not node.host.guests[sandbox].paused
    assert (await edge.exec(sandbox, sh("exit 3"))).exit_code == 3


async def test_who_was_told_that_it_is_paused_finds_it_paused(node, edge, sandbox):
    await edge.pause(sandbox)
    await node.crash(edge)
    edge = await node.open()
    assert (await edge.get(sandbox)).state == "paused"
    assert node.host.guests[sandbox].paused


async def test_an_edge_that_cannot_open_lets_go_of_everything(node):
    edge = node.edge()

    async def broken():
        raise OSError(5, "Input/output error")

    node.backend.owned = broken
    with pytest.raises(OSError, match="Input/output"):
        await edge.open()
    await node.close(edge)
    assert (await (await node.open()).node_info()).state == "serving"
