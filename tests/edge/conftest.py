from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "blobcache"))

from edge_node import Node, request

from dsec.edge import build_edge
from dsec.environments import EnvironmentStore, ScratchStore, build


@pytest.fixture
async def node(tmp_path):
    node = Node(tmp_path)
    yield node
    for edge in list(node.edges):
        await edge.aclose()


@pytest.fixture
async def edge(node):
    return await node.open()


@pytest.fixture
async def sandbox(edge):
    return (await edge.create(request())).sandboxes[0].sandbox_id


@pytest.fixture
async def real_edge(state_run, tiny_rootfs):
    """An edge on the real kernel that has the environment `tiny`; its sandboxes go with it."""
    environments = EnvironmentStore(state_run.state, state_run.run)
    await asyncio.to_thread(build, environments, "tiny", source=f"dir:{tiny_rootfs}", kind="base")
    edge = build_edge(SimpleNamespace(state=state_run.state, run=state_run.run, store=None))
    await edge.open()
    try:
        yield edge
        for info in await edge.list():
            await edge.stop(info.sandbox_id)
    finally:
        await edge.aclose()
        environments.sweep_mounts([])
        ScratchStore(state_run.state, state_run.run).close(unmount=True)
