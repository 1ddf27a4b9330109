"""The server between EROFS and a store: reads in bulk, once, in time; it outlives its own death."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from layers import environments_at, eventually

pytestmark = [pytest.mark.root, pytest.mark.slow]
MIB = 1 << 20


def _acquire(environments, owner="sb-1"):
    digests = environments.resolve(["base"]).digests
    return Path(environments.acquire(digests, owner)[0])


def _forget_pages(environments):
    """Nothing of the mounts stays in the page cache: they are made anew."""
    environments.sweep_mounts([])
    for name in os.listdir(environments.layers.packs.folder):
        if name.endswith(".data"):
            fd = os.open(environments.access.mount / name, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@pytest.fixture
def node(state_run, slow_store):
    with environments_at(state_run.state, state_run.run, slow_store.target, patience_seconds=2.0) as environments:
        yield environments


def test_contents_come_through_whole(node, tree):
    seen = _acquire(node)
    assert not node.access.direct
    assert (seen / "big").read_bytes() == (tree / "big").read_bytes()
    for number in range(40):
        assert (seen / f"small/{number}").read_bytes() == (tree / f"small/{number}").read_bytes()


def test_a_sequential_read_asks_for_much_at_once(node, slow_store):
    seen = _acquire(node)
    slow_store.forget_reads()
    with open(seen / "big", "rb") as file:
        while file.read(1 << 16):
            pass
    sizes = [size for name, _, size in slow_store.reads() if name.endswith(".data")]
    assert sum(sizes) <= 25 * MIB
    assert sorted(sizes)[len(sizes) // 20] >= 256 << 10
    assert sum(sizes) / len(sizes) >= 512 << 10


def test_many_who_want_the_same_are_one_read(node, slow_store):
    seen = _acquire(node)
    slow_store.forget_reads()
    slow_store.tell("delay 0.05")
    threads = [threading.Thread(target=(seen / "big").read_bytes) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = [size for name, _, size in slow_store.reads() if name.endswith(".data")]
    assert sum(sizes) <= 26 * MIB


def test_a_killed_worker_costs_readers_a_moment_only(node, tree, slow_store):
    seen = _acquire(node)
    slow_store.tell("delay 0.02")
    expected, wrong = (tree / "big").read_bytes(), []

    def read():
        if (seen / "big").read_bytes() != expected:
            wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    killed = set()
    while reader.is_alive() and len(killed) < 3:
        status = node.access.status()
        if status.waiting and status.worker not in killed:
            os.kill(status.worker, signal.SIGKILL)
            killed.add(status.worker)
            eventually(node.access.alive, "a new worker serves")
    reader.join(30)
    assert not reader.is_alive()
    assert killed
    assert not wrong


def test_a_killed_keeper_is_replaced(node, tree):
    seen = _acquire(node)
    before = node.access.status()
    os.kill(before.keeper, signal.SIGKILL)
    eventually(lambda: node.access.status().keeper not in (0, before.keeper), "another keeper")
    worker = node.access.status().worker
    assert worker == before.worker
    os.kill(worker, signal.SIGKILL)
    eventually(node.access.alive, "the new keeper starts a worker")
    assert (seen / "big").read_bytes() == (tree / "big").read_bytes()


def test_a_stalled_store_fails_reads_in_time_and_serves_again(node, tree, slow_store):
    seen = _acquire(node)
    slow_store.tell("stall 1")
    begun = time.monotonic()
    with pytest.raises(OSError, match="Input/output error"):
        (seen / "big").read_bytes()
    assert time.monotonic() - begun < 6
    sequence, events = node.access.events(0)
    assert events
    assert {event.reason for event in events} == {"deadline"}
    assert node.access.status().away_ms > 0
    assert node.access.events(sequence)[1] == []
    slow_store.tell("stall 0")
    eventually(lambda: node.access.status().stuck == 0, "the readers come back")
    assert (seen / "big").read_bytes() == (tree / "big").read_bytes()
    assert node.access.status().away_ms == 0


def test_a_store_that_vanishes_and_comes_back(node, tree, slow_store):
    seen = _acquire(node)
    (seen / "small/1").read_bytes()
    slow_store.vanish()
    with pytest.raises(OSError, match="Input/output error"):
        (seen / "big").read_bytes()
    slow_store.come_back()
    assert (seen / "big").read_bytes() == (tree / "big").read_bytes()


def test_a_short_absence_is_only_a_wait(node, tree, slow_store):
    seen = _acquire(node)
    slow_store.tell("stall 1")
    result = []
    reader = threading.Thread(target=lambda: result.append((seen / "small/3").read_bytes()))
    reader.start()
    eventually(lambda: node.access.status().waiting > 0, "a read waits")
    slow_store.tell("stall 0")
    reader.join(10)
    assert result == [(tree / "small/3").read_bytes()]


def test_a_truncated_pack_is_an_error_and_no_zeros(node, slow_store):
    seen = _acquire(node)
    slow_store.tell(f"truncate {MIB}")
    begun = time.monotonic()
    with pytest.raises(OSError, match="Input/output error"):
        (seen / "big").read_bytes()
    assert time.monotonic() - begun < 1.5
    assert {event.reason for event in node.access.events(0)[1]} == {"truncated"}


def test_the_cache_survives_restarts_within_its_size(state_run, slow_store, tree):
    settings = {"patience_seconds": 2.0, "cache_bytes": 32 * MIB}
    with environments_at(state_run.state, state_run.run, slow_store.target, **settings) as node:
        seen = _acquire(node)
        assert (seen / "big").read_bytes() == (tree / "big").read_bytes()
        eventually(lambda: node.access.status().cache_bytes >= 24 * MIB, "blocks are kept")
        assert node.access.status().cache_limit_bytes <= 32 * MIB
    assert not node.access.mounted()
    slow_store.forget_reads()
    with environments_at(state_run.state, state_run.run, slow_store.target, **settings) as node:
        seen = _acquire(node)
        assert (seen / "big").read_bytes() == (tree / "big").read_bytes()
        assert node.access.status().disk_bytes >= 24 * MIB
    assert [size for name, _, size in slow_store.reads() if name.endswith(".data")] == []
    assert (state_run.state / "blocks/blocks").stat().st_size <= 32 * MIB


def test_a_damaged_block_of_the_cache_is_read_from_the_store(state_run, slow_store, tree):
    settings = {"patience_seconds": 2.0, "cache_bytes": 32 * MIB}
    with environments_at(state_run.state, state_run.run, slow_store.target, **settings) as node:
        seen = _acquire(node)
        (seen / "big").read_bytes()
        eventually(lambda: node.access.status().cache_bytes >= 24 * MIB, "blocks are kept")
    with open(state_run.state / "blocks/blocks", "r+b") as file:
        for at in range(0, 24 * MIB, 8 * MIB):
            file.seek(at + 100)
            file.write(b"rot")
    with environments_at(state_run.state, state_run.run, slow_store.target, **settings) as node:
        seen = _acquire(node)
        assert (seen / "big").read_bytes() == (tree / "big").read_bytes()
        assert node.access.status().cache_damaged == 3


@pytest.mark.parametrize("cached", [0, 32 * MIB])
def test_verified_reads_give_nothing_that_was_spoilt(state_run, slow_store, tree, cached):
    settings = {"patience_seconds": 2.0, "verify_reads": True, "cache_bytes": cached}
    with environments_at(state_run.state, state_run.run, slow_store.target, **settings) as node:
        seen = _acquire(node)
        [pack] = slow_store.source.glob("packs/*.data")
        content = (tree / "small/7").read_bytes()
        at = pack.read_bytes().index(content)
        with pack.open("r+b") as file:
            file.seek(at + 10_000)
            file.write(bytes([content[10_000] ^ 1]))
        with pytest.raises(OSError, match="Input/output error"):
            (seen / "small/7").read_bytes()
        assert {event.reason for event in node.access.events(0)[1]} == {"corrupt"}
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(content)
        for number in range(40):
            assert (seen / f"small/{number}").read_bytes() == (tree / f"small/{number}").read_bytes()
        assert (seen / "big").read_bytes() == (tree / "big").read_bytes()


def test_a_spoilt_index_is_noticed_when_reads_are_verified(state_run, slow_store):
    with environments_at(state_run.state, state_run.run, slow_store.target, patience_seconds=2.0, verify_reads=True) as node:
        seen = _acquire(node)
        [index] = slow_store.source.glob("packs/*.index")
        with index.open("r+b") as file:
            file.seek(50)
            file.write(b"spoilt")
        with pytest.raises(OSError, match="Input/output error"):
            (seen / "small/7").read_bytes()
        assert {event.reason for event in node.access.events(0)[1]} == {"corrupt"}


def test_nothing_stays_when_it_ends(state_run, slow_store):
    with environments_at(state_run.state, state_run.run, slow_store.target, patience_seconds=2.0) as node:
        _acquire(node)
        status = node.access.status()
    for pid in (status.keeper, status.worker):
        eventually(lambda pid=pid: _gone(pid), "its processes end")
    assert not node.access.mounted()
    assert not node.access.control.exists()


def _gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
