"""A store that stalls, vanishes or spoils under a node in use: typed errors, nothing hangs, and the node works when it is back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from layers import store_of_roots

from dsec.environments import EnvironmentStore
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, SandboxFailed

pytestmark = [pytest.mark.root, pytest.mark.slow]
MIB = 1 << 20
PATIENCE = 2.0


def wanted(name="tiny"):
    return DSecContainerRunArgs(container_image=name, memory_limit_mb=256, disk_limit_mb=64)


@pytest.fixture
def store(state_run, tiny_rootfs, tmp_path):
    """Two environments that share nothing big: `tiny`, and `other`, which no node has seen yet."""

    def furnish(root):
        for number in range(3):
            (root / f"data{number}").write_bytes(os.urandom(4 * MIB))

    store = store_of_roots(state_run, tiny_rootfs, tmp_path, ("tiny", "other"), furnish)
    yield store
    store.close()


@pytest.fixture
def trouble_node(state_run, store, start_node):
    started = start_node(state_run, store.target, "--store-patience", str(PATIENCE))
    try:
        yield started
    finally:
        if store.process.poll() is None:
            store.tell("stall 0")
        started.process.terminate()
        started.process.wait(60)
        assert started.dsec("down").returncode == 0


def among_daemons(pid):
    return "/daemons" in Path(f"/proc/{pid}/cgroup").read_text()


async def until(condition, what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


async def failed_as_lost(sandbox):
    info = await sandbox.info()
    return info.state == "failed" and info.cause == "store-lost"


def hanging(places):
    """Processes of the node's sandboxes that wait uninterruptibly."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                group = (entry / "cgroup").read_text()
            except OSError:
                continue
            if state == "D" and places.cgroup in group and "/sb-" in group:
                found.append(entry.name)
    return found


async def test_a_stall_fails_who_reads_and_nobody_else(trouble_node, store):
    async with DSecClient(trouble_node.url) as client:
        reader = await client.run_container(wanted())
        idle = await client.run_container(wanted())
        assert (await idle.run_shell("cat /data1 | wc -c")).stdout == b"4194304\n"
        store.tell("stall 1")
        with pytest.raises(SandboxFailed) as caught:
            await reader.run_shell("cat /data0 >/dev/null; sleep 60")
        assert caught.value.cause == "store-lost"
        await until(lambda: failed_as_lost(reader), "the reader's sandbox is lost")
        # who does not read goes on, with what the node has
        assert (await idle.run_shell("cat /data1 | wc -c")).stdout == b"4194304\n"
        assert (await idle.info()).state == "running"
        begun = time.monotonic()
        with pytest.raises(SandboxFailed) as refused:
            await client.run_container(wanted("other"))
        assert refused.value.cause == "store-lost"
        assert time.monotonic() - begun < 5 * PATIENCE
        begun = time.monotonic()
        await idle.stop()
        assert time.monotonic() - begun < 2.0
        assert hanging(trouble_node.places) == []
        store.tell("stall 0")

        async def again():
            try:
                async with await client.run_container(wanted("other")) as back:
                    return (await back.run_shell("cat /data2 | wc -c")).stdout == b"4194304\n"
            except DSecError:
                return False

        await until(again, "the node works again")


async def test_many_creates_while_the_store_is_away_are_told_soon(trouble_node, store):
    async with DSecClient(trouble_node.url) as client:
        first = await client.run_container(wanted())
        await first.run_shell("echo the shell is read")
        store.tell("stall 1")
        begun = time.monotonic()
        results = await asyncio.gather(*(client.run_container(wanted("other")) for _ in range(20)), return_exceptions=True)
        assert {getattr(result, "cause", result) for result in results} == {"store-lost"}
        assert time.monotonic() - begun < 15 * PATIENCE
        # while they wait the edge answers, runs commands and removes sandboxes
        waiting = asyncio.ensure_future(client.run_container(wanted("other")))
        begun = time.monotonic()
        assert (await first.run_shell("echo on")).stdout == b"on\n"
        await first.stop()
        assert time.monotonic() - begun < 1.5
        with pytest.raises(SandboxFailed):
            await waiting
        store.tell("stall 0")


async def test_a_sandbox_whose_read_waits_is_stopped_at_once(state_run, store, start_node):
    node = start_node(state_run, store.target, "--store-patience", "60")
    try:
        async with DSecClient(node.url) as client:
            sandbox = await client.run_container(wanted())
            await sandbox.run_shell("cat /bin/busybox >/dev/null")
            store.tell("stall 1")
            reading = asyncio.ensure_future(sandbox.run_shell("cat /data0 /data1 >/dev/null & cat /data2 | wc -c; wait"))
            access = EnvironmentStore(state_run.state, state_run.run, store.target).access
            await until(lambda: asyncio.to_thread(lambda: access.status().waiting > 1), "its reads wait")
            begun = time.monotonic()
            await sandbox.stop()
            assert time.monotonic() - begun < 2.0
            assert hanging(node.places) == []
            with pytest.raises(DSecError):
                await reading
    finally:
        store.tell("stall 0")
        node.process.terminate()
        node.process.wait(60)
        assert node.dsec("down").returncode == 0


async def test_a_store_that_vanishes_comes_back(trouble_node, store):
    async with DSecClient(trouble_node.url) as client:
        reader = await client.run_container(wanted())
        store.vanish()
        with pytest.raises(SandboxFailed) as caught:
            await reader.run_shell("cat /data0 >/dev/null; sleep 60")
        assert caught.value.cause == "store-lost"
        with pytest.raises(DSecError):
            await client.run_container(wanted("other"))
        store.come_back()
        async with await client.run_container(wanted()) as back:
            assert (await back.run_shell("cat /data0 | wc -c")).stdout == b"4194304\n"


async def test_a_truncated_pack_is_no_zeros(trouble_node, store):
    async with DSecClient(trouble_node.url) as client:
        reader = await client.run_container(wanted())
        await reader.run_shell("cat /bin/busybox >/dev/null")
        store.tell(f"truncate {MIB}")
        with pytest.raises(SandboxFailed) as caught:
            await reader.run_shell("cat /data2 >/dev/null; sleep 60")
        assert caught.value.cause == "store-lost"


async def test_corrupted_metadata_is_refused(trouble_node, store):
    async with DSecClient(trouble_node.url) as client:
        store.tell("corrupt 1")
        with pytest.raises(SandboxFailed) as caught:
            await client.run_container(wanted("other"))
        assert caught.value.cause == "store-lost"
        store.tell("corrupt 0")
        async with await client.run_container(wanted("other")) as sandbox:
            assert (await sandbox.run_shell("echo fine")).stdout == b"fine\n"


async def test_kill_9_of_edge_and_of_the_server(trouble_node, store, state_run, start_node):
    async with DSecClient(trouble_node.url) as client:
        sandbox = await client.run_container(wanted())
        access = EnvironmentStore(state_run.state, state_run.run, store.target).access
        server = access.status()
        assert [among_daemons(pid) for pid in (server.keeper, server.worker)] == [True, True]
        trouble_node.process.kill()
        trouble_node.process.wait()
        again = start_node(state_run, store.target, "--store-patience", str(PATIENCE))
        try:
            assert (await sandbox.run_shell("cat /data0 | wc -c")).stdout == b"4194304\n"
            assert access.status().worker == server.worker
            await sandbox.stop()
        finally:
            again.process.terminate()
            again.process.wait(30)


async def test_the_death_of_the_whole_server_costs_its_sandboxes_and_no_more(trouble_node, store, state_run):
    access = EnvironmentStore(state_run.state, state_run.run, store.target).access
    async with DSecClient(trouble_node.url) as client:
        sandbox = await client.run_container(wanted())
        status = access.status()
        for pid in (status.keeper, status.worker):
            os.kill(pid, signal.SIGSTOP)
        for pid in (status.keeper, status.worker):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: failed_as_lost(sandbox), "its sandbox is lost")

        async def again():
            try:
                async with await client.run_container(wanted()) as back:
                    return (await back.run_shell("cat /data0 | wc -c")).stdout == b"4194304\n"
            except DSecError:
                return False

        await until(again, "a new server serves")


async def test_a_node_goes_down_while_its_store_hangs(state_run, store, start_node):
    node = start_node(state_run, store.target, "--store-patience", "60")
    try:
        async with DSecClient(node.url) as client:
            sandbox = await client.run_container(wanted())
            await sandbox.run_shell("cat /bin/busybox >/dev/null")
            access = EnvironmentStore(state_run.state, state_run.run, store.target).access
            store.tell("stall 1")
            reading = asyncio.ensure_future(sandbox.run_shell("cat /data0 >/dev/null"))
            await until(lambda: asyncio.to_thread(lambda: access.status().waiting > 0), "it reads")
            begun = time.monotonic()
            node.process.kill()
            node.process.wait()
            assert (await asyncio.to_thread(node.dsec, "down")).returncode == 0
            assert time.monotonic() - begun < 30
            assert not access.mounted()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    finally:
        store.tell("stall 0")
        node.process.kill()
        node.process.wait()
        assert (await asyncio.to_thread(node.dsec, "down")).returncode == 0
