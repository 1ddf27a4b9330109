"""The SDK against a real `dsec up` with real sandboxes: what the doubles cannot prove."""

from __future__ import annotations

import asyncio
import os
import subprocess

import aiohttp
import pytest

from libdsec import Conflict, DSecClient, DSecContainerRunArgs, InvalidArgument, NotFound, QuotaExceeded, sync
from libdsec import portal as portals

pytestmark = [pytest.mark.root, pytest.mark.slow]


def tiny(**changes):
    given = {"container_image": "tiny", "memory_limit_mb": 512, "disk_limit_mb": 256, **changes}
    return DSecContainerRunArgs(**given)


@pytest.fixture
async def sandbox(node):
    async with DSecClient(node.url) as client:
        async with await client.run_container(tiny()) as made:
            yield made


async def until(condition, seconds=10.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


async def test_kill_9_in_the_middle_of_200_commands_loses_no_result(state_run, tiny_store, start_node):
    node = start_node(state_run, tiny_store)
    try:
        async with DSecClient(node.url) as client:
            sandboxes = await client.run_many(tiny(), count=4)
            running = [
                asyncio.ensure_future(sandboxes[i % 4].run_shell(f"echo x >>/work/{i}; sleep 2; echo out {i}; echo err >&2; exit {i % 5}"))
                for i in range(200)
            ]

            async def begun():
                return sum([(await each.info()).running_processes for each in sandboxes]) >= 150

            await until(begun)
            node.process.kill()
            node.process.wait()
            node = start_node(state_run, tiny_store)
            results = await asyncio.gather(*running)
            for i, result in enumerate(results):
                assert (result.stdout, result.stderr, result.exit_code) == (f"out {i}\n".encode(), b"err\n", i % 5)
                assert await sandboxes[i % 4].files.read(f"/work/{i}") == b"x\n"
            for each in sandboxes:
                await each.stop()
    finally:
        node.process.terminate()
        node.process.wait(30)
        node.dsec("down")


async def test_a_stream_goes_on_over_kill_9(state_run, tiny_store, start_node):
    node = start_node(state_run, tiny_store)
    try:
        async with DSecClient(node.url) as client, await client.run_container(tiny()) as sandbox:
            process = await sandbox.start(shell="i=0; while [ $i -lt 40 ]; do echo line $i; i=$((i+1)); sleep 0.05; done")
            pieces = []
            async for _, data in process.output():
                pieces.append(data)
                if len(pieces) == 5:
                    node.process.kill()
                    node.process.wait()
                    node = start_node(state_run, tiny_store)
            assert b"".join(pieces) == b"".join(b"line %d\n" % i for i in range(40))
            assert (await process.wait()).ok
            await process.aclose()
    finally:
        node.process.terminate()
        node.process.wait(30)
        node.dsec("down")


async def test_64_mb_go_through_each_way(sandbox):
    data = os.urandom(1 << 20) * 64
    await sandbox.files.write("/work/big", data)
    assert (await sandbox.run_shell("md5sum </work/big")).ok
    assert await sandbox.files.read("/work/big") == data
    process = await sandbox.start(["cat", "/work/big"])
    received = b"".join([piece async for _, piece in process.output()])
    assert received == data
    await process.aclose()
    async with await sandbox.start(["cat"], open_stdin=True) as process:

        async def feed():
            await process.write_stdin(data[: 16 << 20])
            await process.close_stdin()

        feeding = asyncio.ensure_future(feed())
        assert b"".join([piece async for _, piece in process.output()]) == data[: 16 << 20]
        await feeding


async def test_input_and_signals_of_an_interactive_program(sandbox):
    async with await sandbox.start(["sh"], tty=True, rows=30, cols=100) as process:
        await process.write_stdin("stty size; echo ready\n")
        seen = ""
        async for _, text in process.output_text():
            seen += text
            if "ready\r\n" in seen and "30 100" in seen:
                break
        await process.resize(40, 120)
        await process.write_stdin("stty size; exit 5\n")
        async for _, text in process.output_text():
            seen += text
        assert "40 120" in seen
        assert (await process.wait()).exit_code == 5
    async with await sandbox.start(["sleep", "100"]) as process:
        await process.terminate()
        assert (await process.wait(10)).signal == 15


async def test_an_ended_command_is_streamed_from_its_record(sandbox):
    process = await sandbox.start(["echo", "kept"])
    await process.wait()

    async def recorded():
        return (await process.info()).state == "exited"

    await until(recorded)
    assert [piece async for piece in process.output()] == [(1, b"kept\n")]
    assert (await process.kept_output(offset=1)).data == b"ept\n"
    await process.aclose()
    with pytest.raises(Conflict):
        await process.kill()
    with pytest.raises(NotFound):
        await sandbox.process("nothing")


async def test_files_that_are_odd_hostile_or_too_many(sandbox):
    files = sandbox.files
    odd = os.fsdecode(b"/work/odd \xff\n%name")
    await files.write(odd, b"1")
    assert (await files.list("/work"))[0].path == odd
    assert await files.read(odd) == b"1"
    assert b"Linux" in await files.read("/proc/version")
    await sandbox.run_shell(
        "ln -s /etc/passwd /work/link; ln -s ../../../../etc/shadow /work/up; mkfifo /work/pipe; mkdir /work/d; : >/work/d/e"
    )
    with pytest.raises(InvalidArgument):
        await files.read("/work/pipe")
    with pytest.raises(InvalidArgument):
        await files.read("/work/d")
    assert b"root:x:0:0" in await files.read("/work/link")
    with pytest.raises(NotFound):
        await files.read("/work/up")
    with pytest.raises(QuotaExceeded) as caught:
        await files.write("/work/huge", _zeros(400 << 20))
    assert caught.value.cause == "disk"
    assert "huge" not in {each.path for each in await files.list("/work")}


async def test_errors_about_odd_names_are_those_of_any(sandbox, tmp_path):
    files = sandbox.files
    for path in (os.fsdecode(b"/work/\xff"), "/work/" + "\u4e2d" * 80):
        for call in (files.stat, files.read, files.list, files.remove):
            with pytest.raises(NotFound) as caught:
                await call(path)
            assert (caught.value.field, caught.value.ran) == ("path", "not-run")
        for work in (files.write(path + "/x", b""), files.download(path, tmp_path / "x"), files.download_tree(path, tmp_path / "y")):
            with pytest.raises(NotFound) as caught:
                await work
            assert (caught.value.field, caught.value.ran) == ("path", "not-run")


async def _zeros(count):
    block = bytes(1 << 20)
    for _ in range(count >> 20):
        yield block


async def test_an_upload_cut_off_leaves_the_old_file_and_nothing_else(node, sandbox):
    await sandbox.files.write("/work/kept", b"old")
    _, writer = await asyncio.open_unix_connection(node.url.removeprefix("unix://"))
    target = f"/v1/sandboxes/{sandbox.sandbox_id}/files?path=/work/kept"
    writer.write(f"PUT {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n".encode())
    writer.write(b"n" * 5_000_000)
    await writer.drain()

    async def entries(count):
        return len(await sandbox.files.list("/work")) == count

    writer.close()
    await until(lambda: entries(1))
    assert await sandbox.files.read("/work/kept") == b"old"


async def test_trees_keep_links_modes_and_times(sandbox, tmp_path):
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/tool").write_bytes(b"#!/bin/sh\n")
    (source / "a/tool").chmod(0o750)
    os.utime(source / "a/tool", (1000, 1000))
    (source / "a/abs").symlink_to("/etc/passwd")
    await sandbox.files.upload_tree(source, "/work/t")
    shown = await sandbox.run_shell("stat -c '%a %Y %n' /work/t/a/tool; readlink /work/t/a/abs")
    assert shown.stdout == b"750 1000 /work/t/a/tool\n/etc/passwd\n"
    await sandbox.run_shell("mkfifo /work/t/pipe; ln -s / /work/t/root; chmod u+s /work/t/a/tool")
    await sandbox.files.download_tree("/work/t", tmp_path / "back")
    back = tmp_path / "back"
    found = {f"{folder}/{name}".removeprefix(f"{back}/") for folder, folders, files in os.walk(back) for name in [*folders, *files]}
    assert found == {"a", "a/abs", "a/b", "a/tool", "root"}
    assert (back / "a/tool").stat().st_mode & 0o7777 == 0o750
    assert os.readlink(back / "root") == "/"


async def test_hard_links_of_trees_arrive_as_files(node, sandbox, linked_tree):
    await sandbox.files.upload_tree(linked_tree, "/work/hl")
    assert (await sandbox.run_shell("cd /work/hl; cat c d sub/f")).stdout == b"data" * 3
    packed = await asyncio.to_thread(subprocess.run, ["tar", "-C", linked_tree, "-c", "c", "d", "sub"], capture_output=True, check=True)
    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(node.url.removeprefix("unix://"))) as session:
        url = f"/v1/sandboxes/{sandbox.sandbox_id}/files/tree?path=/work/gnu"
        async with session.put(url, data=packed.stdout) as answer:
            assert answer.status == 204
    assert (await sandbox.run_shell("cd /work/gnu; cat c d sub/f")).stdout == b"data" * 3


async def test_a_tree_that_the_disk_does_not_hold_says_that_it_ran(sandbox, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 120 << 20)
    with pytest.raises(QuotaExceeded) as caught:
        await sandbox.files.upload_tree(tmp_path, "/work/t")
    assert (caught.value.cause, caught.value.ran) == ("disk", "ran")
    assert {each.path for each in await sandbox.files.list("/work/t")} == {"/work/t/a", "/work/t/b"}


async def test_a_port_by_tunnel_and_by_http(sandbox):
    await sandbox.files.write("/work/www/index.html", b"hello", parents=True)
    await sandbox.start(["httpd", "-f", "-p", "127.0.0.1:8000", "-h", "/work/www"], background=True)

    async def answers():
        try:
            return (await sandbox.http(8000).get("/index.html")).body == b"hello"
        except NotFound:
            return False

    await until(answers)
    assert (await sandbox.http(8000).get("/none")).status == 404
    async with sandbox.tcp(8000) as connection:
        await connection.write(b"GET /index.html HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := await connection.read():
            answer += piece
        assert answer.endswith(b"hello")
    with pytest.raises(NotFound):
        await sandbox.http(8001).get("/")


async def test_sessions_keep_their_place(sandbox):
    async with await sandbox.open_session(env={"A": "1"}) as session:
        assert (await session.run("cd /work; B=2; pwd")).stdout == b"/work\n"
        result = await session.run("echo $A$B; pwd; sleep 10", timeout=0.3)
        assert result.timed_out
        assert result.stdout.startswith(b"12\n/work\n")


def test_the_twin_on_a_real_node(node):
    try:
        with sync.DSecClient(node.url) as client, client.run_container(tiny()) as sandbox:
            assert sandbox.run_shell("cat /proc/self/status | grep -c Uid").stdout == b"1\n"
            sandbox.files.write("/work/a", "text")
            assert sandbox.files.read_text("/work/a") == "text"
    finally:
        portals.shutdown()


async def test_what_is_shown_of_the_node(node, sandbox):
    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(node.url.removeprefix("unix://"))) as session:
        async with session.get("/metrics") as answer:
            text = await answer.text()
        assert 'dsec_sandboxes{state="running"} 1.0' in text
    assert (await sandbox.info()).memory_bytes is not None
