"""File operations in the sandbox's own root, as one of its users."""

import asyncio
import contextlib
import os
import socket

import pytest

from libdsec.errors import Conflict, Denied, DSecError, InvalidArgument, NotFound
from libdsec.schema import ExecRequest

pytestmark = pytest.mark.root


@pytest.fixture
async def files(box):
    conversation = await box.channel.files("root")
    yield conversation
    await conversation.aclose()


async def write(files, path, data, **options):
    opened = await files.open_write(path, **options)
    try:
        os.write(opened.fd, data)
    finally:
        os.close(opened.fd)
    await files.commit(opened, path)


async def read(files, path):
    opened = await files.open_read(path)
    with os.fdopen(opened.fd, "rb") as file:
        return file.read()


async def test_what_is_written_is_read_here_and_inside(files, box):
    await write(files, "/tmp/a", b"x\0y\n", mode=0o640, uid=1000, gid=1001)
    assert await read(files, "/tmp/a") == b"x\0y\n"
    assert await box.out("stat -c '%a %u %g %s' /tmp/a") == "640 1000 1001 4\n"


@pytest.mark.parametrize("path", ["/etc/hosts", "/etc/hostname"])
async def test_a_file_of_ours_can_be_written_over(files, box, path):
    """A file bound over the image's cannot be renamed over."""
    await box.out(f"head -c 100000 /dev/zero > {path}")
    await write(files, path, b"192.0.2.1 elsewhere\n")
    assert await read(files, path) == b"192.0.2.1 elsewhere\n"
    assert await box.out(f"cat {path}; ls -A {path.rpartition('/')[0]}/.dsec* 2>/dev/null || true") == "192.0.2.1 elsewhere\n"


async def test_the_kernels_own_files_say_what_they_say_to_the_user_inside(files, box):
    """Some look at who reads them, and that must not be us."""
    assert await read(files, "/proc/1/wchan") == (await box.out("cat /proc/1/wchan")).encode()
    addresses = slice(25, 30)
    assert (await read(files, "/proc/1/stat")).split()[addresses] == (await box.out("cat /proc/1/stat")).encode().split()[addresses]
    assert int((await read(files, "/proc/meminfo")).split()[1]) == 256 * 1024
    for path in ("/proc/1/environ", "/proc/1/syscall"):
        with pytest.raises(Denied):
            await read(files, path)


async def test_a_move_names_which_of_its_paths_is_not_there(files):
    await write(files, "/tmp/a", b"")
    for path, target, field in (("/tmp/a", "/nope/x", "target"), ("/tmp/none", "/tmp/b", "path"), ("/tmp/none", "/nope/x", "path")):
        with pytest.raises(NotFound) as caught:
            await files.move(path, target)
        assert (caught.value.field, caught.value.ran) == (field, "not-run")


async def test_an_uncommitted_write_is_not_there_and_leaves_nothing(files, box):
    opened = await files.open_write("/tmp/half")
    os.write(opened.fd, b"half")
    os.close(opened.fd)
    with pytest.raises(NotFound):
        await files.stat("/tmp/half")
    await files.abort(opened)
    assert await box.out("ls -A /tmp") == ""


async def test_closing_aborts_open_writes(box, until):
    files = await box.channel.files("root")
    opened = await files.open_write("/tmp/half")
    os.close(opened.fd)
    await files.aclose()

    async def empty():
        return await box.out("ls -A /tmp") == ""

    await until(empty)


async def test_an_overwrite_keeps_readers_whole(files):
    await write(files, "/tmp/a", b"old")
    opened = await files.open_read("/tmp/a")
    await write(files, "/tmp/a", b"new")
    with os.fdopen(opened.fd, "rb") as file:
        assert file.read() == b"old"
    assert await read(files, "/tmp/a") == b"new"


async def test_parents_are_made_when_asked_for(files):
    with pytest.raises(NotFound):
        await write(files, "/tmp/p/q/r", b"1")
    await write(files, "/tmp/p/q/r", b"1", parents=True)
    assert (await files.stat("/tmp/p/q")).kind == "directory"


async def test_stat_of_every_kind(files, box):
    await box.out("cd /tmp; echo abc > f; ln -s /nowhere l; ln -s f g; mkdir d; mkfifo p")
    await box.out("cd /tmp; chown 1000:1001 f; chmod 4755 f; touch -d @1000000 f")
    shown = await files.stat("/tmp/f")
    assert (shown.kind, shown.size, shown.mode, shown.uid, shown.gid, shown.mtime) == ("file", 4, 0o4755, 1000, 1001, 1_000_000.0)
    link = await files.stat("/tmp/l")
    assert (link.kind, link.target) == ("symlink", "/nowhere")
    assert (await files.stat("/tmp/g", follow=True)).kind == "file"
    with pytest.raises(NotFound):
        await files.stat("/tmp/l", follow=True)
    assert (await files.stat("/tmp/p")).kind == "fifo"
    assert (await files.stat("/dev/null")).kind == "char"


async def test_listing_gives_odd_names_dotfiles_and_depth(files, box):
    await box.out("cd /tmp; mkdir -p d/e; touch d/.dot 'd/a b' d/e/x; touch \"$(printf 'd/n\\nl\\377')\"")
    names = {entry.path async for entry in files.list("/tmp/d")}
    assert names == {"/tmp/d/.dot", "/tmp/d/a b", "/tmp/d/e", "/tmp/d/n\nl\udcff"}
    deep = {entry.path async for entry in files.list("/tmp/d", recursive=True)}
    assert deep == names | {"/tmp/d/e/x"}


async def test_a_deep_tree_is_listed_and_removed_whole(files, box):
    depth = 1000
    await box.out(f"mkdir /tmp/t; cd /tmp/t; for i in $(seq {depth}); do mkdir d; cd d; done; touch leaf", timeout=30)
    paths = {entry.path async for entry in files.list("/tmp/t", recursive=True)}
    assert paths == {"/tmp/t" + "/d" * level for level in range(1, depth + 1)} | {"/tmp/t" + "/d" * depth + "/leaf"}
    await files.remove("/tmp/t", recursive=True)
    assert await box.out("ls -A /tmp") == ""


async def test_a_tree_too_deep_to_walk_is_refused_and_not_cut_short(files, box):
    # deeper than any path that a shell can have: one half is moved to the bottom of the other
    half = "cd {}; i=0; while [ $i -lt 1200 ]; do mkdir d; cd d; i=$((i+1)); done"
    await box.out(f"mkdir /tmp/t /tmp/u; ({half.format('/tmp/u')}); {half.format('/tmp/t')}; mv /tmp/u .", timeout=30)
    with pytest.raises(InvalidArgument) as caught:
        [entry async for entry in files.list("/tmp/t", recursive=True)]
    assert caught.value.field == "path"


@pytest.mark.slow
async def test_a_large_folder_lists_whole_and_a_listing_may_be_left_early(files, box):
    await box.out("mkdir /tmp/big; cd /tmp/big; i=0; while [ $i -lt 20000 ]; do : > $i; i=$((i+1)); done", timeout=60)
    assert len({entry.path async for entry in files.list("/tmp/big")}) == 20000
    async with contextlib.aclosing(files.list("/tmp/big")) as listing:
        await anext(listing)
    assert (await files.stat("/tmp/big")).kind == "directory"


async def test_listing_what_is_no_folder(files):
    for path, error in (("/nowhere", NotFound), ("/etc/passwd", DSecError)):
        with pytest.raises(error):
            [entry async for entry in files.list(path)]
    assert (await files.stat("/etc")).kind == "directory"


async def test_mkdir_move_remove_symlink_and_attributes(files, box):
    await files.mkdir("/tmp/a/b", mode=0o750, parents=True)
    assert await box.out("stat -c %a /tmp/a/b") == "750\n"
    await write(files, "/tmp/a/b/f", b"1")
    await files.move("/tmp/a/b/f", "/tmp/g")
    with pytest.raises(DSecError):
        await files.move("/tmp/g", "/tmp/a")
    await write(files, "/tmp/h", b"2")
    with pytest.raises(Conflict):
        await files.move("/tmp/g", "/tmp/h")
    await files.move("/tmp/g", "/tmp/h", overwrite=True)
    assert await read(files, "/tmp/h") == b"1"
    await files.symlink("h", "/tmp/s")
    assert (await files.stat("/tmp/s")).target == "h"
    await files.set_attributes("/tmp/h", mode=0o600, uid=5, gid=6, mtime_ns=1_500_000_000_000_000_000)
    assert await box.out("stat -c '%a %u %g %Y' /tmp/h") == "600 5 6 1500000000\n"
    with pytest.raises(DSecError):
        await files.remove("/tmp/a")
    await files.remove("/tmp/a", recursive=True)
    await files.remove("/tmp/s")
    assert await box.out("ls /tmp") == "h\n"


async def test_removal_does_not_follow_links_out_of_the_tree(files, box):
    await box.out("mkdir -p /tmp/t /tmp/keep; touch /tmp/keep/f; ln -s /tmp/keep /tmp/t/l; ln -s / /tmp/t/root")
    await files.remove("/tmp/t", recursive=True)
    assert await box.out("ls /tmp/keep") == "f\n"


async def test_links_never_leave_the_sandboxes_root(files, box):
    await box.out("ln -s /../../../../etc/hostname /tmp/up; ln -s /proc/1/root /tmp/proc; ln -s /proc/self/root/etc /tmp/self")
    inside = await box.out("cat /etc/hostname")
    assert (await read(files, "/tmp/up")).decode() == inside
    assert (await read(files, "/../../etc/hostname")).decode() == inside
    with pytest.raises(DSecError):
        await read(files, "/tmp/proc/etc/passwd")


async def test_only_regular_files_are_opened(files, box):
    await box.out("mkfifo /tmp/p")
    for path in ("/tmp/p", "/dev/zero", "/tmp"):
        with pytest.raises(DSecError):
            await asyncio.wait_for(files.open_read(path), 5)


async def test_a_guest_user_has_the_guests_rights(box):
    files = await box.channel.files("guest")
    await write(files, "/home/guest/mine", b"1")
    assert (await files.stat("/home/guest/mine")).uid == 1000
    with pytest.raises(Denied):
        await write(files, "/etc/passwd", b"1")
    with pytest.raises(Denied):
        await files.mkdir("/root/x")
    await files.aclose()
    with pytest.raises(DSecError):
        await box.channel.files("nobody-here")


@pytest.mark.parametrize("path", ["relative", "/a\0b", "/" + "x" * 5000], ids=["relative", "nul", "long"])
async def test_paths_that_cannot_be_are_refused_by_name(files, path):
    with pytest.raises(InvalidArgument) as caught:
        await files.stat(path)
    assert caught.value.field == "path"


async def test_a_full_disk_is_said_to_be_full(boxes):
    box = await boxes(disk_limit_mb=32)
    result = await box.sh("dd if=/dev/zero of=/big bs=1M count=100")
    assert result.exit_code != 0
    assert b"quota" in result.stderr.lower() or b"space" in result.stderr.lower()
    assert (await box.sh("rm /big; sync; echo ok > /small && cat /small")).stdout == b"ok\n"


async def test_watching_tells_of_changes_until_it_is_left(files, box):
    events = files.watch("/tmp")
    first = asyncio.ensure_future(anext(events))
    async with asyncio.timeout(10):
        while not first.done():
            await box.out("touch /tmp/new; rm /tmp/new")
    mask, name = first.result()
    assert name == "new"
    assert mask
    await events.aclose()


async def test_a_port_inside_is_reached_and_the_hosts_are_not(box, until):
    serve = "while :; do echo hello | nc -l -p 8080; done"
    await box.channel.start("op-nc", ExecRequest(shell=serve, background=True))

    async def talk():
        try:
            fd = await box.channel.connect(8080)
        except DSecError:
            return None
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
        try:
            return await asyncio.wait_for(reader.readline(), 5)
        finally:
            writer.close()

    assert await until(talk) == b"hello\n"
    with pytest.raises(DSecError):
        await box.channel.connect(9)
    with pytest.raises(InvalidArgument):
        await box.channel.connect(0)
