"""Snapshots in the rim: in turn with all else that is done with a sandbox, refused where it is over, swept where nobody knows them."""

from __future__ import annotations

import asyncio

import pytest
from edge_node import request, until

from dsec.edge import packs
from libdsec.errors import Conflict, DSecError, NotFound, Overloaded, Unsupported
from libdsec.schema import ForkRequest, PackRequest


async def test_a_fork_of_one_that_is_being_made_waits_for_it(node, edge):
    node.backend.create_gate = asyncio.Event()
    making = asyncio.ensure_future(edge.create(request()))
    [sandbox_id] = await until(lambda: list(edge._core.sandboxes))
    forking = asyncio.ensure_future(edge.fork(sandbox_id, ForkRequest(count=2)))
    await asyncio.sleep(0)
    assert not node.host.snapshots
    node.backend.create_gate.set()
    await making
    forked = await forking
    assert [info.parent for info in forked.sandboxes] == [sandbox_id] * 2
    assert forked.stopped_ms == 1.5
    await until(lambda: not node.host.snapshots)


async def test_a_stop_waits_for_the_snapshot_and_a_snapshot_after_a_stop_is_refused(node, edge, sandbox):
    node.backend.snapshot_gate = asyncio.Event()
    first = asyncio.ensure_future(edge.fork(sandbox, ForkRequest()))
    await until(lambda: edge._core.snapshots)
    stopping = asyncio.ensure_future(edge.stop(sandbox))
    await until(lambda: edge._core.sandboxes[sandbox].status.state == "stopping")
    with pytest.raises(Conflict):
        await edge.fork(sandbox, ForkRequest())
    assert sandbox in node.host.guests, "it is not removed under the snapshot"
    node.backend.snapshot_gate.set()
    assert (await stopping).state == "stopped"
    [child] = (await first).sandboxes
    assert child.state == "running"


async def test_a_snapshot_that_fails_makes_no_sandbox(node, edge, sandbox):
    node.backend.fail_snapshot = DSecError("it did not freeze", ran="not-run")
    with pytest.raises(DSecError, match="did not freeze"):
        await edge.fork(sandbox, ForkRequest(count=3))
    with pytest.raises(DSecError, match="did not freeze"):
        await edge.pack_diff(sandbox, PackRequest(name="x", op_id="op"))
    with pytest.raises(NotFound):
        await edge.pack_info("op")
    assert list(edge._core.sandboxes) == [sandbox]
    assert edge._core.snapshots == set()


async def test_a_cancelled_fork_drops_the_snapshot_that_comes_after_all(node, edge, sandbox):
    node.backend.snapshot_gate = asyncio.Event()
    forking = asyncio.ensure_future(edge.fork(sandbox, ForkRequest()))
    await until(lambda: edge._core.snapshots)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    node.backend.snapshot_gate.set()
    work = edge._core.sandboxes[sandbox].work
    await until(lambda: work.done())
    assert node.host.snapshots == set()
    assert list(edge._core.sandboxes) == [sandbox]


async def test_what_nobody_knows_is_swept(node, edge, sandbox):
    node.host.snapshots |= {"fork-of-another-life", "pack-of-another-life"}
    edge._core.snapshots.add("pack-under-way")
    node.host.snapshots.add("pack-under-way")
    await edge._sweep.once()
    assert node.host.snapshots == {"pack-under-way"}


async def test_a_backend_that_cannot_refuses(node, edge, sandbox, monkeypatch):
    able = node.backend.capabilities()
    unable = type(able)(**dict.fromkeys(able.__dataclass_fields__, False))
    monkeypatch.setattr(node.backend, "capabilities", lambda: unable)
    with pytest.raises(Unsupported):
        await edge.fork(sandbox, ForkRequest())
    with pytest.raises(Unsupported):
        await edge.pack_diff(sandbox, PackRequest(name="x"))


async def test_one_snapshot_that_cannot_be_dropped_ends_no_sweep(node, edge, sandbox):
    node.host.snapshots |= {"a-stuck", "b-left-over"}
    node.backend.stuck_snapshots.add("a-stuck")
    node.host.guests["sb-nobody"] = node.host.guests[sandbox]
    await edge._sweep.once()
    assert node.host.snapshots == {"a-stuck"}
    assert "sb-nobody" not in node.host.guests


async def test_a_fork_that_is_stopped_while_its_disk_is_made_leaves_none(node, edge, sandbox):
    node.backend.branch_gate = asyncio.Event()
    forking = asyncio.ensure_future(edge.fork(sandbox, ForkRequest(count=3)))
    children = await until(lambda: [child for child in edge._core.sandboxes if child != sandbox])
    stopping = asyncio.ensure_future(edge.stop(children[0]))
    await until(lambda: edge._core.sandboxes[children[0]].status.state == "stopping")
    node.backend.branch_gate.set()
    assert (await stopping).state == "stopped"
    made = {info.sandbox_id for info in (await forking).sandboxes}
    assert made == set(children[1:]) == node.host.disks


async def test_a_fork_whose_caller_leaves_while_the_disks_are_made_leaves_none(node, edge, sandbox):
    node.backend.branch_gate = asyncio.Event()
    forking = asyncio.ensure_future(edge.fork(sandbox, ForkRequest(count=3)))
    await until(lambda: len(edge._core.sandboxes) == 4)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    node.backend.branch_gate.set()
    await until(lambda: len(edge._core.sandboxes) == 1)
    assert node.host.disks == set()


async def test_a_fork_that_waited_for_its_snapshot_does_not_launch_once_the_node_ends(node, edge, sandbox):
    node.backend.snapshot_gate = asyncio.Event()
    forking = asyncio.ensure_future(edge.fork(sandbox, ForkRequest()))
    await until(lambda: edge._core.snapshots)
    edge._core.draining = True
    node.backend.snapshot_gate.set()
    with pytest.raises(Overloaded) as refused:
        await forking
    edge._core.draining = False
    assert refused.value.cause == "draining"
    assert list(edge._core.sandboxes) == [sandbox]
    await until(lambda: not node.host.snapshots)


async def test_a_pack_ends_whatever_the_journal_says(node, edge, sandbox, monkeypatch):
    monkeypatch.setattr(packs, "RETRY_SECONDS", 0.01)
    journal = edge._core.journal
    refusals = []

    async def fail(pack):
        write = type(journal._batch).write

        def refuse(batch, db):
            if batch.packs and len(refusals) < 3:
                refusals.append(1)
                raise OSError(28, "No space left on device")
            write(batch, db)

        monkeypatch.setattr(type(journal._batch), "write", refuse)
        raise DSecError("it came to nothing", cause="pack", ran="ran")

    monkeypatch.setattr(edge._packs, "_in_thread", fail)
    monkeypatch.setattr("dsec.trajectory.journal.RETRY_SECONDS", 0.01)
    info = await edge.pack_diff(sandbox, PackRequest(name="x", op_id="op"), wait=5)
    assert (info.state, info.error.message, len(refusals)) == ("failed", "it came to nothing", 3)
    await until(lambda: not edge._packs._packs)
    assert node.host.snapshots == set()
    assert journal.pack("op").state == "failed"


async def test_a_pack_whose_end_cannot_be_encoded_fails(node, edge, sandbox, monkeypatch):
    async def huge(pack):
        return None

    def fill(info, packed):
        info.logical_bytes = 1 << 65

    monkeypatch.setattr(edge._packs, "_in_thread", huge)
    monkeypatch.setattr(packs, "_fill", fill)
    info = await edge.pack_diff(sandbox, PackRequest(name="x", op_id="op"), wait=5)
    assert (info.state, info.error.cause) == ("failed", "pack")
    assert journal_says(edge, "op") == "failed"
    await until(lambda: not edge._packs._packs)
    assert node.host.snapshots == set()


def journal_says(edge, op_id):
    return edge._core.journal.pack(op_id).state
