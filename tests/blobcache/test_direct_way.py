"""EROFS reads the store itself: in bulk, without touching other mounts' settings, and the packs in use are looked after."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest
from layers import environments_at, make_layer

from dsec.environments import EnvironmentStore
from dsec.environments.blobcache import LOCAL_KINDS, kind_of, parse_size, parse_way
from dsec.environments.readahead import BULK_KB
from libdsec import DSecClient, DSecContainerRunArgs

MIB = 1 << 20


def _settings_of_others():
    found = {}
    for bdi in Path("/sys/class/bdi").iterdir():
        try:
            found[bdi.name] = (bdi / "read_ahead_kb").read_text()
        except OSError:
            continue
    return found


@pytest.mark.root
@pytest.mark.slow
def test_a_sequential_read_asks_the_store_for_much_at_once(state_run, slow_store, tree):
    before = _settings_of_others()
    with environments_at(state_run.state, state_run.run, slow_store.target, way="direct") as node:
        assert node.access.direct
        seen = Path(node.acquire(node.resolve(["base"]).digests, "sb-1")[0])
        now = _settings_of_others()
        # others of this machine may mount layers in the same moment
        assert f"{BULK_KB}\n" in [now[name] for name in set(now) - set(before) if name.startswith("erofs-")]
        assert {name: value for name, value in now.items() if name in before} == {name: before[name] for name in now if name in before}
        slow_store.forget_reads()
        with open(seen / "big", "rb") as file:
            content = b"".join(iter(lambda: file.read(1 << 16), b""))
        assert content == (tree / "big").read_bytes()
    sizes = [size for name, _, size in slow_store.reads() if name.endswith(".data")]
    # the first few, while the kernel learns that the read is sequential, are smaller
    assert sum(size for size in sizes if size >= BULK_KB << 10) >= 0.95 * sum(sizes)
    assert sum(sizes) <= 25 * MIB


@pytest.mark.root
@pytest.mark.slow
async def test_a_pack_that_shrinks_fails_its_sandboxes(state_run, tiny_rootfs, tmp_path, start_node):
    store = tmp_path / "store"
    builder = EnvironmentStore(state_run.state / "builder", state_run.run / "builder", store)
    packs = {}
    for name in ("cut", "whole"):
        shutil.copytree(tiny_rootfs, tmp_path / name, symlinks=True)
        (tmp_path / name / "data").write_bytes(os.urandom(MIB))
        # the shell differs, so that they share nothing
        shell = tmp_path / name / "bin/busybox"
        shell.write_bytes(shell.read_bytes() + name.encode())
        packs[name] = make_layer(builder, name, tmp_path / name).identity.packs[0].digest
    node = start_node(state_run, store)
    try:
        async with DSecClient(node.url) as client:
            made = {
                name: await client.run_container(DSecContainerRunArgs(container_image=name, memory_limit_mb=256, disk_limit_mb=64))
                for name in packs
            }
            os.truncate(builder.layers.packs.data(packs["cut"]), 64 << 10)
            deadline = time.monotonic() + 30
            while (info := await made["cut"].info()).state != "failed":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            assert info.cause == "store-lost"
            assert (await made["whole"].run_shell("echo on")).stdout == b"on\n"
            await made["whole"].stop()
    finally:
        node.process.terminate()
        node.process.wait(30)
        assert node.dsec("down").returncode == 0


def test_which_way_is_taken(tmp_path):
    def way(**settings):
        from dsec.environments import StoreSettings

        access = EnvironmentStore(tmp_path / "state", tmp_path / "run", tmp_path / "store", settings=StoreSettings(**settings)).access
        assert access.kind() in LOCAL_KINDS
        return "direct" if access.direct else "server"

    assert way() == "direct"
    assert way(cache_bytes=64 * MIB) == "server"
    assert way(way="server") == "server"
    assert way(way="direct", cache_bytes=64 * MIB) == "direct"


def test_links_are_followed_to_where_the_store_is(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "far").symlink_to(tmp_path / "link/../link")
    (tmp_path / "proc").symlink_to("/proc/self/fd/..")
    assert kind_of(tmp_path / "far/packs") == kind_of(tmp_path)
    assert kind_of(tmp_path / "proc/packs") == "proc"
    (tmp_path / "loop").symlink_to("loop")
    assert kind_of(tmp_path / "loop/packs") in LOCAL_KINDS


@pytest.mark.root
def test_a_store_on_fuse_is_not_read_directly(state_run, slow_store):
    access = EnvironmentStore(state_run.state, state_run.run, slow_store.target).access
    assert access.kind() == "fuse"
    assert not access.direct


@pytest.mark.parametrize(
    ("text", "size"), [("off", 0), ("0", 0), ("20G", 20 << 30), ("1.5m", 3 << 19), ("512KiB", 512 << 10), ("4096", 4096)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1.2.3G", "on"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


def test_what_is_no_way_is_refused():
    with pytest.raises(ValueError, match="none of auto, direct, server"):
        parse_way("fast")
