"""`dsec up` is asked to end while calls of its hang in a store: it ends in a bounded time, its record is whole and sandboxes go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from layers import store_of_roots

from libdsec import DSecClient, DSecContainerRunArgs, DSecError

pytestmark = [pytest.mark.root, pytest.mark.slow]
MIB = 1 << 20
END_SECONDS = 15.0


def wanted(name="tiny"):
    return DSecContainerRunArgs(container_image=name, memory_limit_mb=256, disk_limit_mb=64)


@pytest.fixture
def store(state_run, tiny_rootfs, tmp_path):
    def furnish(root):
        (root / "data").write_bytes(os.urandom(4 * MIB))

    store = store_of_roots(state_run, tiny_rootfs, tmp_path, ("tiny", "other"), furnish)
    yield store
    store.process.send_signal(signal.SIGCONT)
    store.close()


def stop_serving(store):
    """Nobody takes what is asked of it any more, so a thread that waits can be killed, as one that waits for a dead server of NFS."""
    store.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, store.process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.fixture
def troubled(request, state_run, store, start_node):
    """A node on the store, one that would wait for it longer than any test."""
    started = start_node(state_run, store.target, "--store-patience", "600", "--store-way", request.param)
    yield started
    store.process.send_signal(signal.SIGCONT)
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait(60)
    assert started.dsec("down").returncode == 0


def hangs(pid):
    """Whether a thread of the process waits for a FUSE server, or for a page that comes from one."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if "request_wait_answer" in (stack := (thread / "stack").read_text()) or "folio_wait" in stack or "filemap_" in stack:
                return True
    return False


async def until(condition, what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


async def create_other(client, sandbox):
    await client.run_container(wanted("other"))


async def read_data(client, sandbox):
    await sandbox.files.read("/data")


async def remove_environment(client, sandbox):
    await client.remove_environment("other")


@pytest.mark.parametrize(
    ("troubled", "hang", "number"),
    [
        ("server", create_other, signal.SIGTERM),
        ("server", read_data, signal.SIGTERM),
        ("server", remove_environment, signal.SIGTERM),
        ("direct", read_data, signal.SIGTERM),
        ("direct", read_data, signal.SIGINT),
    ],
    indirect=["troubled"],
)
async def test_it_ends_though_a_call_hangs(troubled, state_run, store, start_node, hang, number):
    node = troubled
    async with DSecClient(node.url) as client:
        sandbox = await client.run_container(wanted())
        await sandbox.run_shell("cat /bin/busybox >/dev/null; echo kept >/written")
        stop_serving(store)
        hanging = asyncio.ensure_future(hang(client, sandbox))
        await until(lambda: hangs(node.process.pid), "it hangs")
        last = await sandbox.run_shell("echo the last", op_id="op-last")
        assert last.stdout == b"the last\n"
        begun = time.monotonic()
        node.process.send_signal(number)
        assert await asyncio.to_thread(node.process.wait, 3 * END_SECONDS) == 0
        assert time.monotonic() - begun < END_SECONDS
        with pytest.raises(DSecError):
            await hanging
    assert node.log.read_text().count("calls that have not ended are abandoned") == 1
    # closed in an orderly way, its last writer leaves no log of writes
    assert [name for name in os.listdir(state_run.state) if name.startswith("edge.db")] == ["edge.db"]
    with contextlib.closing(sqlite3.connect(state_run.state / "edge.db")) as journal:
        assert journal.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.process.send_signal(signal.SIGCONT)
    again = start_node(state_run, store.target)
    try:
        async with DSecClient(again.url) as client:
            found = await client.get(sandbox.sandbox_id)
            assert (await found.run_shell("cat /written")).stdout == b"kept\n"
            assert (await found.run_shell("echo the last", op_id="op-last")).replayed
            await found.stop()
    finally:
        again.process.terminate()
        again.process.wait(60)
