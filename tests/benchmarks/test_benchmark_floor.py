"""The floor really makes sandboxes: on the host's own root, as any root with `true` serves."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from benchmarks.floor import Floor
from benchmarks.host import descriptor_count, kernel_memory_bytes, mounts_below, pss_bytes

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def floor(tmp_path):
    return Floor(Path("/"), tmp_path)


@pytest.mark.parametrize("kind", [{}, {"net": False}, {"net": False, "user": False}], ids=["all", "no-net", "no-net-no-user"])
async def test_creates(floor, tmp_path, kind):
    block = await floor.create(6, 2, **kind)
    assert (len(block.samples_ms), block.failures) == (6, 0), block.first_error
    assert all(sample > 0 for sample in block.samples_ms)
    assert block.wall_s > 0
    assert mounts_below(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["floor"], "scratch folders are gone"


async def test_execs(floor):
    block = await floor.exec(5)
    assert (len(block.samples_ms), block.failures) == (5, 0), block.first_error


async def test_a_root_that_is_none_is_a_failure(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    block = await Floor(empty, tmp_path).create(2, 1)
    assert (block.samples_ms, block.failures) == ([], 2)
    assert "ended with status" in block.first_error


def test_connections_of_clients_are_not_counted(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        before = descriptor_count(os.getpid(), except_socket=tmp_path / "s")
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        accepted, _ = listener.accept()
        with accepted:
            assert descriptor_count(os.getpid()) == before + 1
            assert descriptor_count(os.getpid(), except_socket=tmp_path / "s") == before - 1, "listener and accepted are the server's API"


def test_readings_of_this_process_are_plausible():

    assert 1 << 20 < pss_bytes(os.getpid()) < 4 << 30
    assert descriptor_count(os.getpid()) >= 3
    assert all(size > 0 for size in kernel_memory_bytes().values())
