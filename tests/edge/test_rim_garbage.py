"""Edge collects the store's garbage by itself, and does not wait for a store that hangs."""

from __future__ import annotations

import threading

import pytest
from backend_double import DoubleBackend, Host
from edge_node import until

from dsec.edge import Edge, EdgeSettings
from dsec.environments import EnvironmentStore

pytestmark = pytest.mark.root


@pytest.fixture
async def edge(tmp_path):
    environments = EnvironmentStore(tmp_path / "state", tmp_path / "run")
    environments.layers.prepare()
    opened = Edge(
        backends=[DoubleBackend(Host())],
        environments=environments,
        state=tmp_path / "state",
        run=tmp_path / "run",
        settings=EdgeSettings(memory_reserve_mb=1, sweep_seconds=0.01, garbage_seconds=0.05, garbage_grace_seconds=0.0),
    )
    await opened.open()
    yield opened
    await opened.aclose()


async def test_what_nobody_refers_to_goes_by_itself(edge):
    layers = edge.environments.layers.root / "layers"
    lone = layers / ("a" * 64)
    lone.mkdir()
    (lone / "metadata.erofs").write_bytes(b"x")
    await until(lambda: not lone.exists())


async def test_a_store_that_hangs_holds_up_no_sweep(edge, monkeypatch):
    entered, leave, sweeps = threading.Event(), threading.Event(), []

    def hang(**_):
        entered.set()
        leave.wait(30)
        raise OSError("the store is away")

    monkeypatch.setattr(edge.environments, "collect_garbage", hang)
    try:
        await until(entered.is_set)
        prune = edge._sweep.prune

        async def counted():
            sweeps.append(1)
            await prune()

        monkeypatch.setattr(edge._sweep, "prune", counted)
        await until(lambda: len(sweeps) > 3)
    finally:
        leave.set()
    await until(lambda: not edge._sweep._garbage.is_alive())
