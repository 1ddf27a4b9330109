"""Packs of what a sandbox wrote to do harm, and of whose processes something ends: they fail with a type, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dsec.environments import EnvironmentStore
from libdsec.errors import Overloaded
from libdsec.schema import PackRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("branching_edge.py")


async def failed(node, box, **options):
    info = await node.edge.pack_diff(box.id, PackRequest(name=node.name(), **options), wait=60)
    assert info.state == "failed", info
    return info.error


async def process_of(node, op_id, until):
    """The process that makes the pack."""

    def running():
        pack = node.edge._packs._packs.get(op_id)
        return pack is not None and pack.process is not None and pack.process._process

    return await until(running)


async def test_sizes_that_files_claim_do_not_add_up_beyond_what_can_be_told(node):
    box = await node.create()
    await box.sh(f"cd /t; truncate -s {2**63 - 1} a b c")
    info = await box.pack(node.name())
    assert info.logical_bytes == 2**63 - 1
    # as it was told before there was a bound
    manifest = node.edge.environments.layers.folder(info.digest) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(str(2**63 - 1).encode(), str(3 * (2**63 - 1)).encode()))
    environments = EnvironmentStore(node.home.state, node.home.run)
    assert msgspec.msgpack.encode(environments.list())
    assert environments.layers.manifest(info.digest).contents.logical_bytes == 2**63 - 1


@pytest.mark.parametrize(
    "command",
    [f"truncate -s {1 << 50} a; echo bytes | dd of=a conv=notrunc 2>/dev/null", f"truncate -s {2**63 - 1} $(seq 30)"],
    ids=["a few bytes of a pebibyte", "many of the greatest size"],
)
async def test_what_no_layer_can_hold_is_told(node, command):
    box = await node.create()
    await box.sh(f"cd /t; {command}")
    error = await failed(node, box)
    assert (error.code, error.cause, error.ran) == ("unsupported", "tree", "ran")


async def test_a_tree_too_deep_is_told(node):
    box = await node.create()
    deep = "/d" * 700
    await box.sh(f"cd /t; mkdir -p a{deep} b{deep} c{deep}; mv c b{deep}; mv b a{deep}")
    error = await failed(node, box)
    assert (error.code, error.cause, error.ran) == ("unsupported", "too-deep", "ran")


async def test_memory_has_a_bound(home, open_node):
    async with open_node(home, pack_memory_bytes=32 << 20) as node:
        box = await node.create()
        await box.sh("cd /t; seq 20000 | xargs touch")  # more than an interpreter has room for when it has started
        error = await failed(node, box)
        assert (error.code, error.cause, error.ran) == ("quota_exceeded", "memory", "ran")


async def test_a_pack_whose_process_dies_is_begun_again_but_not_for_ever(node, until):
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=4 2>/dev/null")
    begun = await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
    (await process_of(node, begun.op_id, until)).kill()
    assert (await node.edge.pack_info(begun.op_id, wait=60)).state == "published"
    begun = await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
    killed = set()
    while len(killed) < 3:
        process = await process_of(node, begun.op_id, until)
        process.kill()
        killed.add(process.pid)
        await until(lambda process=process: process.returncode is not None)
    info = await node.edge.pack_info(begun.op_id, wait=60)
    assert (info.state, info.error.cause, info.error.ran) == ("failed", "pack-died", "ran")
    await until(node.nothing_packs)


async def test_a_pack_that_each_edge_dies_of_is_not_begun_a_fourth_time(node, until):
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=30 2>/dev/null")
    begun = await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
    await process_of(node, begun.op_id, until)
    # An edge that ends well does not count, one that is killed has counted already: as if it had been, three times.
    await node.restart()
    await process_of(node, begun.op_id, until)
    pack = node.edge._packs._packs[begun.op_id]
    assert pack.job.starts == 1
    pack.job = msgspec.structs.replace(pack.job, starts=4)
    await node.restart()
    info = await node.edge.pack_info(begun.op_id, wait=60)
    assert (info.state, info.error.cause) == ("failed", "pack-died")


async def test_a_tag_ends_at_the_latest_moment(node, until):
    box = await node.create()
    name = node.name()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=40 2>/dev/null; echo 1 > /t/turn")
    packs = [await node.edge.pack_diff(box.id, PackRequest(name=name))]
    await box.sh("rm /t/big; echo 2 > /t/turn")
    packs.append(await node.edge.pack_diff(box.id, PackRequest(name=name)))
    other = await node.edge.pack_diff(box.id, PackRequest(name=node.name()), wait=60)
    assert other.state == "published", "others do not wait"
    await node.restart()
    ended = [await node.edge.pack_info(pack.op_id, wait=60) for pack in packs]
    assert [info.state for info in ended] == ["published", "published"]
    assert ended[0].ended_at <= ended[1].ended_at
    assert await (await node.create(name)).sh("cat /t/turn") == "2\n"


async def test_what_is_more_than_a_node_queues_is_refused(home, open_node):
    async with open_node(home, packs_most=1) as node:
        box = await node.create()
        await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=30 2>/dev/null")
        begun = await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
        with pytest.raises(Overloaded) as refused:
            await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
        assert (refused.value.cause, refused.value.ran) == ("packs", "not-run")
        assert (await node.edge.pack_info(begun.op_id, wait=60)).state == "published"


async def test_nothing_packs_on_for_an_edge_that_was_killed(home, open_node, until):
    command = [sys.executable, str(SCRIPT), str(home.state), str(home.run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: ASYNC220  nothing else goes on meanwhile
        try:
            while not child.stdout.readline().startswith("taken"):
                pass
            packing = await until(lambda: _packing(child.pid))
        finally:
            child.kill()
    await until(lambda: not any(_is_packing(pid) for pid in packing))
    async with open_node(home) as node:
        await until(node.nothing_packs, 60)


def _packing(pid: int) -> list[int]:
    children = [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    return [child for child in children if _is_packing(child)]


def _is_packing(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return b"packprocess" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (ProcessLookupError, FileNotFoundError):
        return False
