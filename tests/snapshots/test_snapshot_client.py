"""pack_diff, restore and fork as users have them: by the SDK, by its blocking twin, by the command."""

from __future__ import annotations

import asyncio
import json

import pytest

from dsec.environments import EnvironmentStore, build
from libdsec import Conflict, DSecClient, DSecContainerRunArgs, InvalidArgument, NotFound, OutcomeUnknown, sync
from libdsec import portal as portals

pytestmark = [pytest.mark.root, pytest.mark.slow]


def tiny(**changes) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(**{"container_image": "tiny", "memory_limit_mb": 256, "disk_limit_mb": 256, **changes})


@pytest.fixture
async def client(server):
    async with DSecClient(server.url) as made:
        yield made
        for info in await made.list():
            if info.state not in ("stopped", "failed"):
                await (await made.get(info.sandbox_id)).stop()


async def test_a_published_snapshot_is_restored_by_name_by_tag_and_by_digest(client):
    sandbox = await client.run_container(tiny())
    await sandbox.run_shell("echo 1 > /t/file")
    first = await sandbox.pack_diff("by-name:one")
    await sandbox.run_shell("echo 2 > /t/file")
    await sandbox.pack_diff("by-name")
    for name, content in (("by-name:one", "1\n"), ("by-name", "2\n"), (f"by-name@{first.digest}", "1\n")):
        restored = await client.restore(name, tiny(labels={"from": "x"}))
        assert (await restored.run_shell("cat /t/file")).stdout_text == content
        assert restored.created.labels == {"from": "x"}
    assert first.state == "published"
    assert first.stopped_ms < 1000
    assert (await client.environment("by-name:one")).kind == "snapshot"


async def test_a_pack_that_nobody_waits_for_is_asked_about_by_its_id(client):
    sandbox = await client.run_container(tiny())
    await sandbox.run_shell("dd if=/dev/urandom of=/t/big bs=1M count=20")
    begun = await sandbox.pack_diff("later", wait=False)
    assert begun.state in ("packing", "published")
    await sandbox.stop()
    info = await client.pack(begun.op_id, wait=30)
    assert info.state == "published"
    assert info.data_bytes >= 20 << 20
    with pytest.raises(NotFound):
        await client.pack("no-such-pack")


async def test_past_its_timeout_a_pack_goes_on(client):
    sandbox = await client.run_container(tiny())
    await sandbox.run_shell("for i in $(seq 3000); do echo $i > /t/$i; done")
    with pytest.raises(OutcomeUnknown) as late:
        await sandbox.pack_diff("slow", timeout=0.001)
    assert (await client.pack(late.value.details["op_id"], wait=60)).state == "published"


async def test_forks_are_sandboxes_like_others(client):
    async with await client.run_container(tiny(labels={"a": "1"})) as parent:
        await parent.files.write("/t/file", b"from the parent")
        children = await parent.fork(5, labels={"child": "yes"})
        assert {child.created.parent for child in children} == {parent.sandbox_id}
        read = await asyncio.gather(*(child.files.read("/t/file") for child in children))
        assert read == [b"from the parent"] * 5
        assert {info.sandbox_id for info in await client.list(labels={"child": "yes"})} >= {child.sandbox_id for child in children}
        for child in children:
            await child.stop()
        assert [info.state for info in [await child.info() for child in children]] == ["stopped"] * 5
    with pytest.raises(Conflict):
        await parent.fork(1)
    with pytest.raises(InvalidArgument):
        await parent.fork(0)


def test_the_blocking_twin_does_the_same(server):
    try:
        with sync.DSecClient(server.url) as client, client.run_container(tiny()) as sandbox:
            sandbox.run_shell("echo twin > /t/file")
            [child] = sandbox.fork(1)
            with child:
                assert child.run_shell("cat /t/file").stdout_text == "twin\n"
                info = child.pack_diff("twin", scrub=["*.o"])
            with client.restore(f"twin@{info.digest}") as restored:
                assert restored.run_shell("cat /t/file").stdout_text == "twin\n"
    finally:
        portals.shutdown()


def test_the_commands(server):
    made = said(server, "run", "-d", "tiny").strip()
    said(server, "exec", made, "sh", "-c", "echo typed > /t/file; echo x > /t/x.o")
    info = json.loads(said(server, "pack-diff", made, "typed:v1", "--scrub", "*.o", "--json"))
    assert (info["state"], info["left_out"]) == ("published", 1)
    assert said(server, "pack-diff", made, "typed:v2").startswith("typed:v2 sha256:")
    restored = said(server, "restore", "typed:v1").strip()
    forks = said(server, "fork", made, "-n", "2").split()
    for sandbox_id, files in ((restored, "file\n"), (forks[0], "file\nx.o\n"), (forks[1], "file\nx.o\n")):
        assert said(server, "exec", sandbox_id, "ls", "/t") == files
    refused = server.dsec("pack-diff", made, "..")
    assert refused.returncode != 0
    assert b"name" in refused.stderr
    said(server, "rm", made, restored, *forks)


def said(server, *words: str) -> str:
    """Standard output of a command that has to succeed."""
    done = server.dsec(*words)
    assert done.returncode == 0, (words, done.stderr.decode(), server.log.read_text()[-3000:])
    return done.stdout.decode()


async def test_a_killed_server_is_waited_for_and_the_pack_is_one(state_run, base_root, start_node):
    store = state_run.state / "store"
    await asyncio.to_thread(build, EnvironmentStore(state_run.state, state_run.run), "tiny", source=f"dir:{base_root}", kind="base")
    server = await asyncio.to_thread(start_node, state_run, store)
    try:
        async with DSecClient(server.url) as client:
            sandbox = await client.run_container(tiny())
            await sandbox.run_shell("dd if=/dev/urandom of=/t/big bs=1M count=60")
            packing = asyncio.ensure_future(sandbox.pack_diff("killed", op_id="pack-killed"))
            while True:
                try:
                    await client.pack("pack-killed")
                    break
                except NotFound:
                    await asyncio.sleep(0.002)
            server.process.kill()
            server.process.wait()
            server = await asyncio.to_thread(start_node, state_run, store)
            info = await packing
            assert (info.op_id, info.state) == ("pack-killed", "published")
            restored = await client.restore("killed")
            assert (await restored.run_shell("wc -c < /t/big")).stdout_text == f"{60 << 20}\n"
    finally:
        server.process.terminate()
        await asyncio.to_thread(server.process.wait, 30)
        await asyncio.to_thread(server.dsec, "down")
