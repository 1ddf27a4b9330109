from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from edge_double import EdgeDouble

from dsec.apiserver import ApiServer
from dsec.apiserver.shortcut import Shortcut


@dataclass
class Served:
    edge: EdgeDouble
    path: Path
    server: ApiServer

    @property
    def url(self) -> str:
        return f"unix://{self.path}"


@pytest.fixture
async def served(tmp_path):
    """A server over a double, on a Unix socket."""
    edge = EdgeDouble(tmp_path / "root")
    (tmp_path / "root").mkdir()
    path = tmp_path / "dsec.sock"
    async with ApiServer(edge, path) as server:
        yield Served(edge, path, server)
    await edge.aclose()


@pytest.fixture
async def http(served):
    """A bare HTTP client of the server."""
    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(served.path))) as session:
        yield session


@pytest.fixture
def ways(monkeypatch):
    """The paths of requests, by the way that they took: "short" or "ordinary"."""
    taken = {"short": [], "ordinary": []}
    route = Shortcut._route

    def noting(self, scope):
        found = route(self, scope)
        taken["ordinary" if found is None else "short"].append(scope["path"])
        return found

    monkeypatch.setattr(Shortcut, "_route", noting)
    return taken


@pytest.fixture
def short(ways):
    return ways["short"]


@pytest.fixture
def ordinary(ways):
    return ways["ordinary"]
