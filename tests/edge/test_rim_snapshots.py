"""Snapshots in the rim: in turn with all else that is done with a sandbox, refused where it is over, swept where nobody knows them."""

from __future__ import annotations

import asyncio

import pytest
from edge_node import request, until

from libdsec.errors import Conflict, DSecError, NotFound, Unsupported
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
