"""One host with its edges, for tests of the rim."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from backend_double import DoubleBackend, DoubleEnvironments, Host

from dsec.edge import Edge, EdgeSettings
from libdsec.schema import ContainerRunArgs, CreateRequest


async def until(condition, seconds: float = 5.0):
    """Poll `condition` to a true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.002)
    return value


def request(count: int = 1, **args) -> CreateRequest:
    return CreateRequest(args=ContainerRunArgs(**{"container_image": "debian", **args}), count=count)


class Node:
    """One host, and the edges that come and go on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.host = Host()
        self.backend = DoubleBackend(self.host)
        self.edges: list[Edge] = []

    def edge(self, **settings) -> Edge:
        self.backend = DoubleBackend(self.host)
        edge = Edge(
            backends=[self.backend],
            environments=DoubleEnvironments(),
            state=self.path / "state",
            run=self.path / "run",
            settings=EdgeSettings(**{"memory_reserve_mb": 1, **settings}),
        )
        self.edges.append(edge)
        return edge

    async def open(self, **settings) -> Edge:
        edge = self.edge(**settings)
        await edge.open()
        return edge

    def freeze_journal(self, edge: Edge) -> None:
        """From now on nothing more is committed."""
        edge._core.journal._hand_over = lambda: None

    async def crash(self, edge: Edge) -> None:
        """As nearly as one process can: nothing more is committed, nothing more reaches the host."""
        self.freeze_journal(edge)
        core, journal = edge._core, edge._core.journal
        self.backend.host = Host()
        core.timers.close()
        for sandbox in core.sandboxes.values():
            if sandbox.channel is not None:
                await sandbox.channel.aclose()
        while core._tasks:
            for task in list(core._tasks):
                task.cancel()
            await asyncio.gather(*core._tasks, return_exceptions=True)
        journal._batch, journal._soon, journal._timer = type(journal._batch)(), False, None
        del journal._hand_over
        core.sandboxes.clear()
        await self.close(edge)

    async def close(self, edge: Edge) -> None:
        self.edges.remove(edge)
        await edge.aclose()
