"""Creating: the door, admission, batches, idempotency, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sqlite3
import time

import pytest
from edge_node import request, until

from dsec.trajectory.batch import Batch
from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound, Overloaded, SandboxFailed, Unsupported
from libdsec.schema import ForkRequest


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"container_image": ""}, "container_image"),
        ({"container_image": "debian", "environment": ["other"]}, "environment"),
        ({"memory_limit_mb": 0}, "memory_limit_mb"),
        ({"memory_limit_mb": -1}, "memory_limit_mb"),
        ({"memory_limit_mb": 1 << 40}, "memory_limit_mb"),
        ({"cpu_cores_limit": 0.0}, "cpu_cores_limit"),
        ({"cpu_cores_limit": -2.0}, "cpu_cores_limit"),
        ({"cpu_cores_limit": math.nan}, "cpu_cores_limit"),
        ({"cpu_cores_limit": math.inf}, "cpu_cores_limit"),
        ({"pids_limit": 0}, "pids_limit"),
        ({"disk_limit_mb": 0}, "disk_limit_mb"),
        ({"ttl_running_stop": -1.0}, "ttl_running_stop"),
        ({"ttl_running_stop": math.nan}, "ttl_running_stop"),
        ({"ttl_max": 0.0}, "ttl_max"),
        ({"ttl_paused_stop": math.inf}, "ttl_paused_stop"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": {"": "c"}}, "env"),
        ({"env": {"A": "c\0"}}, "env"),
        ({"hostname": "-bad"}, "hostname"),
        ({"hostname": "a" * 64}, "hostname"),
        ({"hostname": "a\0b"}, "hostname"),
        ({"hostname": "ok\n"}, "hostname"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {"k": "v" * 1025}}, "labels"),
        ({"workdir": "relative"}, "workdir"),
        ({"init_user": "no such:user:x"}, "init_user"),
        ({"init_user": "70000"}, "init_user"),
    ],
)
async def test_bad_arguments_are_refused_by_name_and_nothing_is_made(node, edge, args, field):
    with pytest.raises(InvalidArgument) as raised:
        await edge.create(request(**args))
    assert raised.value.field == field
    assert raised.value.ran == "not-run"
    assert node.host.guests == {}
    assert list(await edge.list()) == []


async def test_an_unknown_environment_is_named(edge):
    with pytest.raises(NotFound) as raised:
        await edge.create(request(container_image="nosuch"))
    assert raised.value.field == "container_image"


async def test_an_allowlist_is_not_there_yet(edge):
    assert (await edge.create(request(network_rules={"npm": False}))).sandboxes
    with pytest.raises(Unsupported):
        await edge.create(request(network_rules={"pypi": True}))


async def test_more_than_the_host_has_is_refused_and_a_default_lowered(node, edge, monkeypatch):
    for field in ("cpu_cores_limit", "memory_limit_mb"):
        with pytest.raises(InvalidArgument, match="this host has") as raised:
            await edge.create(request(**{field: 1 << 20}))
        assert (raised.value.field, raised.value.ran) == (field, "not-run")
    monkeypatch.setattr(edge._creation, "_cpu_count", 1)
    monkeypatch.setattr(edge._creation, "_memory_mb", 1000)
    made = (await edge.create(request())).sandboxes[0]
    assert (made.args.cpu_cores_limit, made.args.memory_limit_mb) == (1.0, 1000)
    made = (await edge.fork(made.sandbox_id, ForkRequest())).sandboxes[0]
    assert (made.args.cpu_cores_limit, made.args.memory_limit_mb) == (1.0, 1000)


async def test_what_it_is_made_of_is_merged(node, edge):
    made = (await edge.create(request(env={"A": "1"}, labels={"job": "x"}))).sandboxes[0]
    spec = node.host.guests[made.sandbox_id].spec
    assert spec.env == {"LANG": "C.UTF-8", "A": "1"}
    assert spec.workdir == "/srv"
    assert made.environment == ["debian@sha256:" + "0" * 64]
    assert [info.sandbox_id for info in await edge.list(labels={"job": "x"})] == [made.sandbox_id]
    assert list(await edge.list(labels={"job": "y"})) == []


async def test_a_batch_is_made_a_few_at_a_time(node):
    edge = await node.open(launches_at_once=3)
    node.backend.create_gate = asyncio.Event()
    creating = asyncio.ensure_future(edge.create(request(count=10)))
    await until(lambda: node.backend.launching == 3)
    node.backend.create_gate.set()
    result = await creating
    assert len({info.sandbox_id for info in result.sandboxes}) == 10
    assert node.backend.most_launching == 3


async def test_it_is_on_record_before_it_is_launched(node, edge):
    node.backend.create_gate = asyncio.Event()
    creating = asyncio.ensure_future(edge.create(request(count=2)))
    await until(lambda: node.backend.launching == 2)
    with sqlite3.connect(node.path / "state/edge.db") as db:
        assert db.execute("SELECT state, count(*) FROM sandboxes GROUP BY state").fetchall() == [("creating", 2)]
    db.close()
    node.backend.create_gate.set()
    await creating


async def test_that_it_runs_is_on_record_before_anybody_is_told(node, edge):
    made = (await edge.create(request())).sandboxes[0]
    with sqlite3.connect(node.path / "state/edge.db") as db:
        assert db.execute("SELECT sandbox_id, state FROM sandboxes").fetchall() == [(made.sandbox_id, "running")]
    db.close()


async def test_some_of_a_batch_may_fail(node, edge):
    node.backend.fail_create = [SandboxFailed("no blob", cause="store-lost", ran="not-run"), RuntimeError("bug")]
    result = await edge.create(request(count=5))
    assert len(result.sandboxes) == 3
    assert sorted((error.code, error.cause) for error in result.errors) == [
        ("sandbox_failed", "launch-failed"),
        ("sandbox_failed", "store-lost"),
    ]
    assert len(await edge.list("failed")) == 2


async def test_the_error_of_the_only_one_is_raised(node, edge):
    node.backend.fail_create = [InvalidArgument("no such user", field="init_user")]
    with pytest.raises(InvalidArgument) as raised:
        await edge.create(request())
    assert raised.value.field == "init_user"


async def test_a_key_gives_the_same_sandboxes(edge):
    first = await edge.create(request(count=3), "key")
    again = await edge.create(request(count=3), "key")
    assert [info.sandbox_id for info in again.sandboxes] == [info.sandbox_id for info in first.sandboxes]
    assert len(await edge.list()) == 3


async def test_a_key_used_twice_at_once_makes_one(node, edge):
    node.backend.create_gate = asyncio.Event()
    both = [asyncio.ensure_future(edge.create(request(), "key")) for _ in range(2)]
    await until(lambda: node.backend.launching == 1)
    node.backend.create_gate.set()
    first, second = await asyncio.gather(*both)
    assert first.sandboxes[0].sandbox_id == second.sandboxes[0].sandbox_id


async def test_a_key_of_another_request_is_a_conflict(edge):
    await edge.create(request(), "key")
    with pytest.raises(Conflict, match="idempotency"):
        await edge.create(request(memory_limit_mb=77), "key")


async def test_a_failed_create_frees_its_key(node, edge):
    node.backend.fail_create = [SandboxFailed("no", cause="disk", ran="not-run")]
    with pytest.raises(SandboxFailed):
        await edge.create(request(), "key")
    assert (await edge.create(request(), "key")).sandboxes


async def test_a_client_that_leaves_leaves_nothing_behind(node, edge):
    node.backend.create_gate = asyncio.Event()
    creating = asyncio.ensure_future(edge.create(request(count=40), "key"))
    await until(lambda: node.backend.launching)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    node.backend.create_gate.set()
    await until(lambda: not edge._core.sandboxes)
    assert node.host.guests == {}
    assert {info.state for info in await edge.list()} == {"stopped"}
    assert (await edge.create(request(count=40), "key")).sandboxes[0].state == "running"


async def test_a_stop_while_creating_ends_both(node, edge):
    node.backend.create_gate = asyncio.Event()
    creating = asyncio.ensure_future(edge.create(request()))
    await until(lambda: node.backend.launching)
    sandbox_id = (await edge.list())[0].sandbox_id
    assert (await edge.stop(sandbox_id)).state == "stopped"
    with pytest.raises(SandboxFailed) as raised:
        await creating
    assert raised.value.cause == "stopped"
    assert node.host.guests == {}


async def test_no_more_than_fit_are_admitted(node):
    edge = await node.open(max_sandboxes=3)
    await edge.create(request(count=2))
    with pytest.raises(Overloaded) as raised:
        await edge.create(request(count=2))
    assert raised.value.ran == "not-run"
    assert len(node.host.guests) == 2
    assert (await edge.create(request())).sandboxes


async def test_memory_must_stay_free(node):
    edge = await node.open(memory_reserve_mb=1 << 30)
    with pytest.raises(Overloaded, match="memory"):
        await edge.create(request())


async def test_a_shut_down_node_takes_nothing(node):
    edge = await node.open()
    await node.close(edge)
    with pytest.raises(DSecError, match="shutting down"):
        await edge.create(request())


@pytest.mark.parametrize("seed", range(4))
async def test_memory_and_record_agree_whatever_commits_fail(node, edge, monkeypatch, seed):
    chance, write, create, told = random.Random(seed), Batch.write, node.backend.create, set()
    full = True

    def flaky(batch, db):
        time.sleep(chance.uniform(0, 0.004))
        if full and chance.random() < 0.3:
            raise sqlite3.OperationalError("database or disk is full")
        write(batch, db)

    async def slow(spec):
        await asyncio.sleep(chance.uniform(0, 0.01))
        return await create(spec)

    async def creator(name):
        for number in range(10):
            with contextlib.suppress(Overloaded):
                made = await edge.create(request(count=chance.choice([1, 1, 2])), f"{name}-{number}")
                told.update(info.sandbox_id for info in made.sandboxes)

    monkeypatch.setattr(Batch, "write", flaky)
    monkeypatch.setattr("dsec.trajectory.journal.RETRY_SECONDS", 0.02)
    node.backend.create = slow
    await asyncio.gather(*(creator(name) for name in range(10)))
    full = False
    await until(lambda: all(sandbox.status.state == "running" for sandbox in edge._core.sandboxes.values()))
    await edge._core.journal.flush()
    recorded = {row.sandbox_id: row.state for row in edge._core.journal.sandboxes(living=True)}
    assert told == set(edge._core.sandboxes) == set(node.host.guests)
    assert recorded == dict.fromkeys(told, "running")
