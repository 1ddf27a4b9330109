from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from edge_node import Node, request


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
