"""Reads through the files API whose store is away or damaged: the typed error at once, and the sandbox fails as by a command's read."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from types import SimpleNamespace

import pytest
from layers import store_of_roots

from dsec.edge import build_edge
from dsec.environments import EnvironmentStore, ScratchStore, StoreSettings
from libdsec import ConnectionFailed, DSecClient, DSecContainerRunArgs, SandboxFailed
from libdsec.schema import ContainerRunArgs, CreateRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]
MIB = 1 << 20
PATIENCE = 1.5
WANTED = DSecContainerRunArgs(container_image="tiny", memory_limit_mb=256, disk_limit_mb=64)
APART = DSecContainerRunArgs(container_image="apart", memory_limit_mb=256, disk_limit_mb=64)


@pytest.fixture
def store(state_run, tiny_rootfs, tmp_path):
    def furnish(root):
        # it differs, so that they share no pack
        shell = root / "bin/busybox"
        shell.write_bytes(shell.read_bytes() + root.name.encode())
        (root / "folder").mkdir()
        for file in ("data0", "data1", "folder/data2"):
            (root / file).write_bytes(os.urandom(4 * MIB))

    store = store_of_roots(state_run, tiny_rootfs, tmp_path, ("tiny", "apart"), furnish)
    yield store
    store.close()


@pytest.fixture
def start_troubled(state_run, store, start_node):
    """`start_troubled(way)`: a node on the store; it is whole again before the node ends."""
    started = []

    def start(way):
        started.append(start_node(state_run, store.target, "--store-patience", str(PATIENCE), "--store-way", way))
        return started[0]

    yield start
    if store.process.poll() is None:
        store.tell("stall 0")
        store.tell("eio 0")
    for node in started:
        node.process.terminate()
        node.process.wait(60)
        assert node.dsec("down").returncode == 0


async def download(sandbox, tmp_path):
    await sandbox.files.read("/data0")


async def change(sandbox, tmp_path):
    # it is copied up, which reads it
    await sandbox.files.set_attributes("/data0", mode=0o600)


async def nothing_is_read(node, store):
    """What was read ahead for a command that has ended fails nobody later."""
    access = EnvironmentStore(node.places.state, node.places.run, store.target).access
    deadline = time.monotonic() + 20
    for _ in iter(lambda: access.status().waiting, 0):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def lost_at_once(sandbox, read, tmp_path):
    """The read fails with the typed error, and when it has, the sandbox is failed already."""
    begun = time.monotonic()
    with pytest.raises(SandboxFailed) as caught:
        await read(sandbox, tmp_path)
    assert caught.value.cause == "store-lost"
    assert time.monotonic() - begun < 4 * PATIENCE + 2
    info = await sandbox.info()
    assert (info.state, info.cause) == ("failed", "store-lost")


@pytest.mark.parametrize("read", [download, change])
@pytest.mark.parametrize("trouble", ["stall", "vanish"])
async def test_a_read_that_the_server_of_packs_could_not_serve(start_troubled, store, read, trouble, tmp_path):
    node = start_troubled("server")
    async with DSecClient(node.url) as client:
        reader, other = await client.run_container(WANTED), await client.run_container(APART)
        await other.run_shell("cat /bin/busybox >/dev/null")
        await nothing_is_read(node, store)
        if trouble == "stall":
            store.tell("stall 1")
        else:
            store.vanish()
        await lost_at_once(reader, read, tmp_path)
        # who did not read goes on, with what the node has
        assert (await other.run_shell("echo on")).stdout == b"on\n"
        assert (await other.info()).state == "running"
        await other.stop()
        if trouble == "vanish":
            store.come_back()


@pytest.mark.parametrize("read", [download, change])
@pytest.mark.parametrize("trouble", ["eio", "vanish"])
async def test_a_read_of_the_stores_own_files(start_troubled, store, read, trouble, tmp_path):
    node = start_troubled("direct")
    async with DSecClient(node.url) as client:
        reader = await client.run_container(WANTED)
        if trouble == "eio":
            store.tell("eio 1")
        else:
            store.vanish()
        await lost_at_once(reader, read, tmp_path)
        if trouble == "vanish":
            store.come_back()


async def test_a_tree_that_breaks_in_the_middle(start_troubled, store, tmp_path):
    """It has begun, so its end can only be that it breaks off; why is told to the next call."""
    node = start_troubled("server")
    async with DSecClient(node.url) as client:
        sandbox = await client.run_container(WANTED)
        store.tell("stall 1")
        with pytest.raises(ConnectionFailed):
            await sandbox.files.download_tree("/folder", tmp_path / "copy")
        with pytest.raises(SandboxFailed) as caught:
            await sandbox.files.stat("/data0")
        assert caught.value.cause == "store-lost"


@pytest.fixture
async def open_edge(state_run, store):
    """`open_edge(way)`: an edge in this process, and two sandboxes of it."""
    edges = []

    async def start(way):
        settings = StoreSettings(way=way, patience_seconds=PATIENCE)
        edge = build_edge(SimpleNamespace(state=state_run.state, run=state_run.run, store=store.target), packs=settings)
        await edge.open()
        edges.append(edge)
        args = ContainerRunArgs(container_image="tiny", memory_limit_mb=256, disk_limit_mb=64)
        made = await edge.create(CreateRequest(args=args, count=2))
        return edge, [sandbox.sandbox_id for sandbox in made.sandboxes]

    yield start
    store.tell("stall 0")
    for edge in edges:
        await edge.stop_all()
        await edge.aclose()
    environments = EnvironmentStore(state_run.state, state_run.run, store.target)
    await asyncio.to_thread(environments.sweep_mounts, [])
    await asyncio.to_thread(environments.close)
    await asyncio.to_thread(ScratchStore(state_run.state, state_run.run).close, unmount=True)


async def closed_while_passes(talk, error):
    """As a reader of an open file's bytes that has met `error` closes the conversation."""
    try:
        raise error
    finally:
        await talk.aclose()


@pytest.mark.parametrize("way", ["server", "direct"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT])
async def test_a_read_that_fails_while_the_store_is_fine(open_edge, way, number):
    edge, [one, _] = await open_edge(way)
    error = OSError(number, "as the disk below says")
    with pytest.raises(OSError, match="as the disk below says") as caught:
        await closed_while_passes(await edge.files(one), error)
    assert caught.value is error
    assert (await edge.get(one)).state == "running"


async def test_what_another_read_before_does_not_count(open_edge, store):
    edge, [one, other] = await open_edge("server")
    store.tell("stall 1")
    talk = await edge.files(one)
    opened = await talk.open_read("/data0")
    with pytest.raises(OSError, match="Input/output") as caught:
        await asyncio.to_thread(os.pread, opened.fd, 4096, 0)
    os.close(opened.fd)
    failed_in = int(time.time())
    store.tell("stall 0")
    # the server's clock counts whole seconds
    await asyncio.sleep(failed_in + 1 - time.time())
    with pytest.raises(OSError, match="Input/output"):
        await closed_while_passes(await edge.files(other), OSError(errno.EIO, "Input/output error"))
    assert (await edge.get(other)).state == "running"
    # he who read it is still told
    with pytest.raises(SandboxFailed) as told:
        await closed_while_passes(talk, caught.value)
    assert told.value.cause == "store-lost"


async def test_an_error_that_says_nothing_of_a_disk_is_not_looked_into(open_edge, store):
    edge, [one, _] = await open_edge("server")
    store.tell("stall 1")
    talk = await edge.files(one)
    begun = time.monotonic()
    with pytest.raises(BrokenPipeError):
        await closed_while_passes(talk, BrokenPipeError(errno.EPIPE, "the client left"))
    assert time.monotonic() - begun < PATIENCE / 2
    assert (await edge.get(one)).state == "running"
