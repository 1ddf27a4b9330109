"""Files through the SDK: bodies both ways, names, and what is left after failures."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import stat
import tarfile
import threading
import time

import aiohttp
import pytest
from files_double import FilesDouble
from polling import until

from dsec.apiserver.filedata import read_pieces, write_pieces
from libdsec import Conflict, DSecClient, DSecContainerRunArgs, InvalidArgument, NotFound


@pytest.fixture
async def sandbox(served):
    async with DSecClient(served.url) as client:
        async with await client.run_container(DSecContainerRunArgs(container_image="debian")) as made:
            yield made


@pytest.fixture
def root(served):
    return served.edge.root


@pytest.fixture(autouse=True)
def all_conversations_end(request):
    before = FilesDouble.opened
    yield
    assert FilesDouble.opened == before


async def test_what_is_written_is_read(sandbox, root):
    data = os.urandom(3_000_001)
    shown = await sandbox.files.write("/a", data, mode=0o640)
    assert (shown.size, shown.mode, shown.kind) == (len(data), 0o640, "file")
    assert await sandbox.files.read("/a") == data
    assert await sandbox.files.read("/a", start=1_000_000, length=5) == data[1_000_000:1_000_005]
    assert await sandbox.files.read("/a", start=len(data) - 3) == data[-3:]
    assert (root / "a").read_bytes() == data


async def test_text_iterators_and_open_files_are_written(sandbox, tmp_path):
    async def pieces():
        yield b"one "
        yield b"two"

    await sandbox.files.write("/text", "grün\n")
    assert await sandbox.files.read_text("/text") == "grün\n"
    await sandbox.files.write("/pieces", pieces())
    assert await sandbox.files.read("/pieces") == b"one two"
    (tmp_path / "local").write_bytes(b"x" * 700_000)
    await sandbox.files.upload(tmp_path / "local", "/deep/er/up", parents=True)
    assert await sandbox.files.download("/deep/er/up", tmp_path / "back") == 700_000
    assert (tmp_path / "back").read_bytes() == b"x" * 700_000


async def test_an_empty_file_is_a_file(sandbox):
    assert (await sandbox.files.write("/empty", b"")).size == 0
    assert await sandbox.files.read("/empty") == b""


async def test_names_that_are_not_utf8_survive(sandbox, root):
    name = os.fsdecode(b"/caf\xe9 %20+&?#\n")
    await sandbox.files.write(name, b"data")
    assert os.listdir(os.fsencode(root)) == [b"caf\xe9 %20+&?#\n"]
    (entry,) = await sandbox.files.list("/")
    assert entry.path == name
    assert (await sandbox.files.stat(name)).path == name
    assert await sandbox.files.read(name) == b"data"
    await sandbox.files.remove(name)
    assert await sandbox.files.list("/") == []


@pytest.mark.parametrize(
    "call",
    [
        lambda files, path: files.stat(path),
        lambda files, path: files.read(path),
        lambda files, path: files.list(path),
        lambda files, path: files.remove(path),
        lambda files, path: files.write(path + "/x", b""),
        lambda files, path: files.download_tree(path, "never made"),
        lambda files, path: anext(files.watch(path)),
    ],
)
async def test_an_error_about_a_name_that_is_not_utf8_is_typed(sandbox, call):
    with pytest.raises(NotFound) as caught:
        await call(sandbox.files, os.fsdecode(b"/none \xff"))
    assert (caught.value.ran, caught.value.message.isascii()) == ("not-run", True)
    assert r"none \udcff" in caught.value.message


async def test_surrogates_that_are_no_bytes_are_refused(sandbox):
    for field, call in (("path", sandbox.files.stat("/\ud800")), ("target", sandbox.files.move("/a", "/\ud800"))):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert caught.value.field == field


async def test_directories_moves_links_and_attributes(sandbox, root):
    files = sandbox.files
    await files.mkdir("/d/e", parents=True)
    await files.write("/d/f", b"1")
    await files.move("/d/f", "/d/e/g")
    await files.write("/d/h", b"2")
    with pytest.raises(Conflict):
        await files.move("/d/h", "/d/e/g")
    await files.move("/d/h", "/d/e/g", overwrite=True)
    await files.symlink("/nowhere/at all", "/d/link")
    await files.set_attributes("/d/e/g", mode=0o600, mtime=1234.5)
    found = {each.path: each for each in await files.list("/d", recursive=True)}
    assert list(found) == ["/d/e", "/d/e/g", "/d/link"]
    assert (found["/d/e/g"].mode, found["/d/e/g"].mtime) == (0o600, 1234.5)
    assert found["/d/link"].target == "/nowhere/at all"
    await files.remove("/d", recursive=True)
    with pytest.raises(NotFound):
        await files.stat("/d")


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("path", lambda files: files.read("relative")),
        ("path", lambda files: files.write("/nul\0byte", b"")),
        ("mode", lambda files: files.write("/x", b"", mode=0o77777)),
        ("owner", lambda files: files.write("/x", b"", owner="root")),
        ("path", lambda files: files.read("/")),
        ("start", lambda files: files.read("/x", start=-1)),
        ("mtime", lambda files: files.set_attributes("/", mtime=math.nan)),
        ("mtime", lambda files: files.set_attributes("/", mtime=1e300)),
        ("mtime", lambda files: files.set_attributes("/", mtime=-1)),
    ],
)
async def test_bad_arguments_are_named(sandbox, root, field, call):
    with pytest.raises(InvalidArgument) as caught:
        await call(sandbox.files)
    assert caught.value.field == field
    assert list(root.iterdir()) == []


async def test_an_upload_cut_off_leaves_the_old_file(served, sandbox, root):
    await sandbox.files.write("/kept", b"old")
    _, writer = await asyncio.open_unix_connection(str(served.path))
    head = f"PUT /v1/sandboxes/{sandbox.sandbox_id}/files?path=/kept HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n"
    writer.write(head.encode() + b"n" * 5_000_000)
    await writer.drain()
    await until(lambda: len(list(root.iterdir())) == 2)
    writer.close()
    await until(lambda: len(list(root.iterdir())) == 1)
    assert (root / "kept").read_bytes() == b"old"


async def test_an_iterator_that_fails_leaves_nothing(sandbox, root):
    async def broken():
        yield b"x" * 100_000
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await sandbox.files.write("/new", broken())
    await until(lambda: not list(root.iterdir()))


@pytest.mark.parametrize("data", [None, 5, [b"a"], iter([b"a"]), io.StringIO("text")])
async def test_what_cannot_be_written_is_refused_before_anything_is_sent(sandbox, root, data):
    with pytest.raises(InvalidArgument) as caught:
        await sandbox.files.write("/new/file", data, parents=True)
    assert (caught.value.field, caught.value.ran) == ("data", "not-run")
    assert list(root.iterdir()) == []


async def test_an_iterator_of_what_is_not_bytes_is_refused(sandbox, root):
    async def text():
        yield b"bytes"
        yield "text"

    with pytest.raises(InvalidArgument) as caught:
        await sandbox.files.write("/new", text())
    assert (caught.value.field, caught.value.ran) == ("data", "not-run")
    await until(lambda: not list(root.iterdir()))


async def test_a_tree_that_is_none_is_refused_before_anything_is_sent(sandbox, root, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for local in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(InvalidArgument) as caught:
            await sandbox.files.upload_tree(local, "/new")
        assert (caught.value.field, caught.value.ran) == ("local", "not-run")
    assert list(root.iterdir()) == []


async def test_a_range_is_honoured_and_one_beyond_is_refused(served, sandbox):
    await sandbox.files.write("/r", b"0123456789")
    url = f"http://x/v1/sandboxes/{sandbox.sandbox_id}/files?path=/r"
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(served.path))) as session:
        async with session.get(url, headers={"Range": "bytes=-3"}) as answer:
            assert (answer.status, await answer.read(), answer.headers["content-range"]) == (206, b"789", "bytes 7-9/10")
        async with session.get(url, headers={"Range": "bytes=0-1,4-5"}) as answer:
            assert (answer.status, await answer.read()) == (200, b"0123456789")
        async with session.get(url, headers={"Range": "lines=1-2"}) as answer:
            assert (answer.status, await answer.read()) == (200, b"0123456789")
        for bad in ("bytes=10-", "bytes=-0", "bytes=4-2", "bytes=-", "bytes=a-b", f"bytes={2**62}-", f"bytes={'9' * 5000}-"):
            async with session.get(url, headers={"Range": bad}) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["field"] == "range"
    for start in (10**9, 2**62, 2**80):
        with pytest.raises(InvalidArgument):
            await sandbox.files.read("/r", start=start)


async def test_trees_go_both_ways(sandbox, root, tmp_path):
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "tool").write_bytes(b"#!/bin/sh\n")
    (source / "sub" / "tool").chmod(0o755)
    (source / ".hidden").write_bytes(b"h" * 1_000_000)
    (source / "abs").symlink_to("/etc/passwd")
    await sandbox.files.upload_tree(source, "/work")
    assert (root / "work/.hidden").read_bytes() == b"h" * 1_000_000
    assert os.readlink(root / "work/abs") == "/etc/passwd"
    await sandbox.files.upload_tree(source, "/work")
    target = tmp_path / "target"
    await sandbox.files.download_tree("/work", target)
    assert sorted(str(each.relative_to(target)) for each in target.rglob("*")) == [".hidden", "abs", "sub", "sub/empty", "sub/tool"]
    assert stat.S_IMODE((target / "sub/tool").stat().st_mode) == 0o755
    assert os.readlink(target / "abs") == "/etc/passwd"
    with pytest.raises(InvalidArgument):
        await sandbox.files.download_tree("/work/.hidden", target)


async def test_an_archive_cannot_leave_its_folder(served, sandbox, root):
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        member = tarfile.TarInfo("../escaped")
        archive.addfile(member)
    url = f"http://x/v1/sandboxes/{sandbox.sandbox_id}/files/tree?path=/in"
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(served.path))) as session:
        async with session.put(url, data=body.getvalue()) as answer:
            assert answer.status == 400
        async with session.put(url, data=b"x" * 2048) as answer:
            assert answer.status == 400
    assert list(root.iterdir()) == []


async def test_every_name_of_a_file_with_several_arrives(sandbox, root, linked_tree, tmp_path):
    await sandbox.files.upload_tree(linked_tree, "/hl")
    assert [(root / "hl" / name).read_bytes() for name in ("c", "d", "sub/f")] == [b"data"] * 3
    await sandbox.files.download_tree("/hl", tmp_path / "back")
    assert (tmp_path / "back/sub/f").read_bytes() == b"data"


def entry(name, kind=tarfile.REGTYPE, target="", data=b"", mode=0o644, **headers):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size, made.mode, made.pax_headers = kind, target, len(data), mode, headers
    return made, data


@pytest.fixture
async def put_tree(served, sandbox):
    """Unpacks an archive of entries into /in; the answer's status and error."""

    async def put(*entries):
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for made, data in entries:
                archive.addfile(made, io.BytesIO(data))
        url = f"http://x/v1/sandboxes/{sandbox.sandbox_id}/files/tree?path=/in"
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(served.path))) as session:
            async with session.put(url, data=body.getvalue()) as answer:
                return answer.status, (await answer.json())["error"] if answer.status >= 400 else None

    return put


async def test_a_hard_link_in_an_archive_becomes_a_file(put_tree, root):
    links = entry("sub/d", tarfile.LNKTYPE, "./a/c"), entry("e", tarfile.LNKTYPE, "sub/d")
    assert await put_tree(entry("a/c", data=b"x" * 600_000, mode=0o750), *links) == (204, None)
    for name in ("a/c", "sub/d", "e"):
        assert (root / "in" / name).read_bytes() == b"x" * 600_000
        assert stat.S_IMODE((root / "in" / name).stat().st_mode) == 0o750


@pytest.mark.parametrize(
    "entries",
    [
        [entry("d", tarfile.LNKTYPE, "none")],
        [entry("d", tarfile.LNKTYPE, "there")],
        [entry("d", tarfile.LNKTYPE, "../secret")],
        [entry("d", tarfile.LNKTYPE, "/secret")],
        [entry("d", tarfile.LNKTYPE, "c"), entry("c", data=b"late")],
        [entry("c", tarfile.SYMTYPE, "../secret"), entry("d", tarfile.LNKTYPE, "c")],
        [entry("c", data=b"1"), entry("c", tarfile.SYMTYPE, "../secret"), entry("d", tarfile.LNKTYPE, "c")],
        [entry("s/secret", data=b"1"), entry("d", tarfile.LNKTYPE, "s/secret")],
        [entry("c", tarfile.DIRTYPE, mode=0o755), entry("d", tarfile.LNKTYPE, "c")],
    ],
)
async def test_a_hard_link_names_a_file_of_the_archive_and_no_symlink(put_tree, root, entries):
    (root / "secret").write_bytes(b"secret")
    (root / "in").mkdir()
    (root / "in/there").write_bytes(b"")
    (root / "in/s").symlink_to("..")
    status, error = await put_tree(*entries)
    assert (status, error["code"], error["field"]) == (400, "invalid_argument", "body")
    assert not (root / "in/d").exists()


@pytest.mark.parametrize(("said", "kept"), [("1234.5", 1234.5), ("-5", -5), ("nan", None), ("inf", None), ("1e300", None)])
async def test_files_of_an_archive_have_its_times(put_tree, root, said, kept):
    before = time.time() - 1
    assert await put_tree(entry("c", data=b"1", mtime=said), entry("d", tarfile.LNKTYPE, "c")) == (204, None)
    for name in ("c", "d"):
        found = (root / "in" / name).stat().st_mtime
        assert found == kept if kept is not None else found >= before


async def test_an_archive_that_fails_midway_says_that_it_ran(put_tree, root):
    _, error = await put_tree(entry("../x"), entry("whole", data=b"1"))
    assert (error["ran"], list(root.iterdir())) == ("not-run", [])
    _, error = await put_tree(entry("whole", data=b"1"), entry("../x"))
    assert (error["code"], error["ran"]) == ("invalid_argument", "ran")
    assert (root / "in/whole").read_bytes() == b"1"


async def test_an_empty_archive_makes_its_folder(put_tree, root):
    assert await put_tree() == (204, None)
    assert (root / "in").is_dir()


async def test_watch_tells_new_names(sandbox):
    async with asyncio.timeout(5):
        watching = sandbox.files.watch("/")
        first = asyncio.ensure_future(anext(watching))
        while not first.done():
            await sandbox.files.write("/new", b"")
            await sandbox.files.remove("/new")
            await asyncio.sleep(0.02)
            if not first.done():
                await sandbox.files.write("/other", b"")
                await asyncio.wait([first], timeout=0.1)
                if not first.done():
                    await sandbox.files.remove("/other")
        mask, name = first.result()
        assert (mask, name) in ((0x100, "other"), (0x100, "new"))
        await watching.aclose()
    with pytest.raises(NotFound):
        await anext(sandbox.files.watch("/gone"))


async def test_files_that_hang_hold_up_nobody_else():
    """A full pipe stands for a file whose store does not answer."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1 << 16))
    os.set_blocking(writing, True)

    async def body():
        yield b"more"

    hanging = [asyncio.ensure_future(write_pieces(writing, body())) for _ in range(40)]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1
        # Whoever leaves does not wait for the file, nor does closing his descriptor take it from under the call.
        for task in hanging:
            task.cancel()
        done, _ = await asyncio.wait(hanging, timeout=5)
        assert len(done) == 40
        os.close(writing)
        writing = -1
        kept = [name for name in os.listdir("/proc/self/fd") if _same_pipe(int(name), reading)]
        assert len(kept) == 40
    finally:
        if writing >= 0:
            os.close(writing)
        os.close(reading)
    await until(lambda: not any(thread.name == "dsec-work" for thread in threading.enumerate()))


def _same_pipe(fd: int, reading: int) -> bool:
    with contextlib.suppress(OSError):
        return fd != reading and os.path.samestat(os.fstat(fd), os.fstat(reading))
    return False


async def test_a_reader_who_leaves_early_leaves_nothing_open(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    pieces = read_pieces(fd, 0, None)
    assert len(await anext(pieces)) == 1 << 20
    await pieces.aclose()
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)
    os.close(fd)
