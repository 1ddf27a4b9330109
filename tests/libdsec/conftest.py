from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "apiserver"))

from edge_double import EdgeDouble

from dsec.apiserver import ApiServer, create_app
from libdsec import DSecClient
from libdsec.asgi import AsgiTransport

# The first loop of libuv in a process makes a pipe for signals that stays: made here, no test is held to have left it.
uvloop.new_event_loop().close()


@pytest.fixture
async def edge(tmp_path):
    (tmp_path / "root").mkdir()
    double = EdgeDouble(tmp_path / "root")
    yield double
    await double.aclose()


@pytest.fixture(params=["asgi", "unix"])
async def client(request, edge, tmp_path):
    """The same client over both transports."""
    if request.param == "asgi":
        app = await asyncio.to_thread(create_app, edge)
        async with DSecClient(transport=AsgiTransport(app)) as made:
            yield made
        return
    path = tmp_path / "dsec.sock"
    async with ApiServer(edge, path), DSecClient(f"unix://{path}") as made:
        yield made
