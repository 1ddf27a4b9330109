"""Forks on the real kernel: what children begin with, what they do not, and what they do not see of each other."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from dsec.kernel import btrfs
from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound
from libdsec.schema import ForkRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]


async def test_children_begin_with_the_parents_last_writes_and_are_apart_from_then_on(node):
    box = await node.create()
    await box.sh("echo one > /t/file; mkdir /t/d; mv /below /moved; rm /bin/awk")
    first, second = await box.fork(2)
    assert (
        await first.sh("cat /t/file; ls /moved; ls /bin/awk 2>&1 || true")
        == "one\ndeep\none\ntwo\nls: /bin/awk: No such file or directory\n"
    )
    await first.sh("echo two > /t/file; touch /t/d/first; rm /moved/one")
    await box.sh("echo three > /t/file")
    assert await first.sh("cat /t/file") == "two\n"
    assert await second.sh("cat /t/file; ls /t/d; ls /moved") == "one\ndeep\none\ntwo\n"
    assert await box.sh("cat /t/file; ls /t/d") == "three\n"


async def test_what_was_written_and_never_synced_is_there(node):
    """Also of a program that writes all the time: what the child has is what there was at one moment."""
    box = await node.create()
    await box.background("i=0; while :; do i=$((i+1)); echo $i >> /t/log; done")
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=20 2>/dev/null; until test -s /t/log; do :; done")
    [child] = await box.fork()
    assert await child.sh("md5sum < /t/big") == await box.sh("md5sum < /t/big")
    log = (await child.sh("cat /t/log")).split()
    assert log == [str(number) for number in range(1, len(log) + 1)]


async def test_each_child_has_its_own_identity_and_none_has_the_parents_processes(node):
    box = await node.create(hostname="parent", labels={"a": "1"}, env={"TOKEN": "secret"})
    await box.sh("echo 0123 > /etc/machine-id; echo seed > /var/lib/systemd/random-seed")
    await box.background("sleep 600")
    first, second = await box.fork(2, labels={"b": "2"}, env={"MORE": "1"})
    names = [await each.sh("hostname; cat /etc/hostname /etc/machine-id") for each in (box, first, second)]
    assert len(set(names)) == 3
    assert len(names[1].split()[2]) == 32
    for child in (first, second):
        assert await child.sh("ls /var/lib/systemd; ps | grep -c '[s]leep 600' || true; echo $TOKEN $MORE") == "0\nsecret 1\n"
        info = await node.edge.get(child.id)
        assert (info.parent, info.labels, info.environment) == (box.id, {"a": "1", "b": "2"}, (await node.edge.get(box.id)).environment)
    [named] = await first.fork(hostname="chosen")
    assert await named.sh("hostname") == "chosen\n"
    assert (await node.edge.get(named.id)).parent == first.id


async def test_limits_and_time_limits_are_inherited_unless_given(node):
    box = await node.create(ttl_running_stop=500, ttl_max=1000, disk_limit_mb=64)
    [same], [other] = await box.fork(), await box.fork(ttl_running_stop=-1, ttl_max=7, memory_limit_mb=100, disk_limit_mb=32)
    args = [(await node.edge.get(each.id)).args for each in (same, other)]
    assert (args[0].ttl_running_stop, args[0].ttl_max, args[0].memory_limit_mb, args[0].disk_limit_mb) == (500, 1000, 256, 64)
    assert (args[1].ttl_running_stop, args[1].ttl_max, args[1].memory_limit_mb, args[1].disk_limit_mb) == (None, 7, 100, 32)


async def test_a_child_is_charged_with_what_it_writes_itself(node):
    box = await node.create(disk_limit_mb=64)
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=40 2>/dev/null; sync")
    [child] = await box.fork()
    assert "written" in await child.sh("dd if=/dev/urandom of=/t/own bs=1M count=40 2>/dev/null && echo written")
    refused = await child.sh("dd if=/dev/urandom of=/t/more bs=1M count=60 2>&1 || true")
    assert "quota" in refused.lower() or "no space" in refused.lower(), refused
    assert "written" in await box.sh("dd if=/dev/urandom of=/t/own bs=1M count=15 2>/dev/null && echo written"), (
        "a sibling's limit is not ours"
    )


async def test_a_paused_sandbox_is_forked_and_stays_paused(node):
    box = await node.create()
    await box.sh("echo kept > /t/file")
    await node.edge.pause(box.id)
    [child] = await box.fork()
    assert await child.sh("cat /t/file") == "kept\n"
    assert (await node.edge.get(box.id)).state == "paused"
    assert node.backend._cgroups.frozen(box.id)


async def test_a_fork_of_a_fork_of_a_fork(node):
    box = await node.create()
    for number in range(5):
        await box.sh(f"echo {number} > /t/{number}; rm -f /t/{number - 2}")
        [child] = await box.fork()
        await box.stop()
        box = child
    assert await box.sh("cd /t; cat *; ls") == "3\n4\n3\n4\n"


async def test_repeating_a_key_gives_the_same_children(node):
    box = await node.create()
    request = ForkRequest(count=3)
    first, again = await asyncio.gather(*(node.edge.fork(box.id, request, "key-1") for _ in range(2)))
    assert [each.sandbox_id for each in first.sandboxes] == [each.sandbox_id for each in again.sandboxes]
    with pytest.raises(Conflict, match="another request"):
        await node.edge.fork(box.id, ForkRequest(count=2), "key-1")


async def test_bad_input_is_refused_by_name(node):
    box = await node.create()
    with pytest.raises(NotFound):
        await node.edge.fork("sb-local-nobody", ForkRequest())
    for field, options in (("count", {"count": 0}), ("memory_limit_mb", {"memory_limit_mb": 1}), ("hostname", {"hostname": "-"})):
        with pytest.raises(InvalidArgument) as refused:
            await node.edge.fork(box.id, ForkRequest(**options))
        assert refused.value.field == field
    await box.stop()
    with pytest.raises(Conflict) as over:
        await node.edge.fork(box.id, ForkRequest())
    assert over.value.cause == "stopped"


async def test_a_cancelled_fork_leaves_nothing(node, until):
    box = await node.create()
    forking = asyncio.ensure_future(node.edge.fork(box.id, ForkRequest(count=8)))
    await until(lambda: len(node.edge._core.sandboxes) > 1)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    await until(lambda: set(node.edge._core.sandboxes) == {box.id})
    assert await box.sh("echo alive") == "alive\n"


async def test_a_hundred_children(node):
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=100 2>/dev/null; md5sum < /t/big > /t/sum")
    children = await box.fork(100, pids_limit=16)
    assert len({child.id for child in children}) == 100
    for child in children[::20]:
        assert await child.sh("md5sum < /t/big | cmp - /t/sum && echo same") == "same\n"


async def test_after_a_pause_that_failed_snapshots_freeze_again(node, monkeypatch):
    box = await node.create()
    groups = node.backend._cgroups
    freeze = groups.freeze

    def fail(sandbox_id):
        freeze(sandbox_id)
        raise OSError("it did not freeze in time")

    monkeypatch.setattr(groups, "freeze", fail)
    with pytest.raises(DSecError):
        await node.edge.pause(box.id)
    monkeypatch.undo()
    assert not groups.frozen(box.id)
    assert await box.sh("echo runs", timeout=10) == "runs\n"
    forked = await node.edge.fork(box.id, ForkRequest())
    assert forked.stopped_ms > 0


async def test_quota_groups_of_ended_parents_go_with_the_sweep(node, until):
    scratch = node.backend._scratch
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=4 2>/dev/null")
    before = btrfs.qgroup_ids(scratch._filesystem)
    for _ in range(4):
        [child] = await box.fork()
        await child.sh("dd if=/dev/urandom of=/t/own bs=1M count=2 2>/dev/null")
        await box.stop()
        box = child

    async def swept():
        await node.edge._sweep.once()
        btrfs.sync(scratch._fd)
        return len(btrfs.qgroup_ids(scratch._filesystem)) <= len(before) + 4

    await until(swept)
    await box.stop()

    async def gone():
        await node.edge._sweep.once()
        btrfs.sync(scratch._fd)
        return len(btrfs.qgroup_ids(scratch._filesystem)) < len(before)

    await until(gone)


async def test_what_a_parent_made_of_our_files_places_keeps_no_fork_from_living(node):
    """Its own files are shown over regular files alone: not over folders, and through no link to its devices."""
    box = await node.create()
    await box.sh("rm /etc/machine-id; mkdir -p /etc/machine-id/deep /var/lib/dbus; ln -s /dev/null /var/lib/dbus/machine-id")
    [child] = await box.fork()
    restored = await node.create((await box.pack(node.name())).name)
    for each in (child, restored):
        assert await each.sh("echo gone > /dev/null; cat /dev/null; ls /etc/machine-id") == "deep\n"


async def test_a_link_among_its_own_files_is_followed_whatever_is_renamed_meanwhile(node, tmp_path):
    """A rename anywhere on the host makes the kernel give up a look-up with `..` in it, to be tried again."""
    box = await node.create()
    await box.sh("mkdir /run/ids; mv /etc/machine-id /run/ids/id; ln -s ../run/ids/id /etc/machine-id")
    script = "import os, sys\nos.chdir(sys.argv[1])\nopen('a', 'w')\nwhile True: os.rename('a', 'b'); os.rename('b', 'a')"
    with subprocess.Popen([sys.executable, "-c", script, tmp_path]) as renaming:  # noqa: ASYNC220  it goes on meanwhile
        try:
            children = await box.fork(12)
        finally:
            renaming.kill()
    ids = [await each.sh("cat /etc/machine-id") for each in (box, *children)]
    assert ids[0] == "etc/machine-id"
    assert {len(each) for each in ids[1:]} == {33}
    assert len(set(ids)) == 13
