"""Writable folders with a limit, on an image that outlives its process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from dsec.environments import ScratchStore
from dsec.kernel import btrfs
from dsec.kernel.loop import loop_devices_of
from dsec.kernel.mountinfo import mount_at
from libdsec.errors import Conflict, DSecError, InvalidArgument, QuotaExceeded, Unsupported

pytestmark = pytest.mark.root

MIB = 1 << 20


def write_until_refused(path, most):
    """Bytes that could be written, and why no more."""
    with open(path, "wb", buffering=0) as file:
        for written in range(most):
            try:
                file.write(os.urandom(MIB))
                if written % 8 == 7:
                    os.fsync(file.fileno())
            except OSError as error:
                return written, error.errno
    return most, None


def make_folders(path, count):
    for number in range(count):
        (path / str(number)).mkdir()


def quota_groups(scratch):
    fd = os.open(scratch.path, os.O_RDONLY)
    try:
        return btrfs.qgroup_ids(btrfs.filesystem_id(fd))
    finally:
        os.close(fd)


def settle(scratch, wanted):
    """Wait until `wanted()`; the cleaner works at each commit."""
    deadline = time.monotonic() + 30
    while not wanted():
        assert time.monotonic() < deadline
        fd = os.open(scratch.path, os.O_RDONLY)
        btrfs.sync(fd)
        os.close(fd)
        time.sleep(0.02)


def test_a_folder_is_made_as_an_overlay_wants_it(scratch):
    path = scratch.create("sb-1", None)
    assert path == scratch.path / "sb-1"
    assert sorted(os.listdir(path)) == ["upper", "work"]
    status = (path / "upper").stat()
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o755, 0, 0)
    assert scratch.list() == {"sb-1"}
    assert scratch.capabilities.disk_limit
    assert scratch.capabilities.image


def test_past_its_limit_a_sandbox_gets_edquot_and_its_neighbour_does_not(scratch):
    small, big = scratch.create("small", 16 * MIB), scratch.create("big", 64 * MIB)
    written, why = write_until_refused(small / "upper/file", 40)
    assert (why, 12 <= written <= 16) == (errno.EDQUOT, True)
    assert write_until_refused(big / "upper/file", 40) == (40, None)
    with pytest.raises(OSError, match="quota"):
        make_folders(small / "upper", 100_000)


def test_removing_files_makes_room_again(scratch):
    path = scratch.create("sb-1", 16 * MIB)
    assert write_until_refused(path / "upper/file", 40)[1] == errno.EDQUOT
    (path / "upper/file").unlink()
    settle(scratch, lambda: scratch.usage("sb-1") < 4 * MIB)
    assert write_until_refused(path / "upper/file", 8) == (8, None)


def test_usage_follows_what_is_written(scratch):
    path = scratch.create("sb-1", 64 * MIB)
    assert write_until_refused(path / "upper/file", 8) == (8, None)
    assert 8 * MIB <= scratch.usage("sb-1") < 9 * MIB
    assert scratch.usage("sb-unknown") is None


def test_what_is_destroyed_leaves_neither_folder_nor_quota_nor_bytes(scratch):
    before = quota_groups(scratch)
    for number in range(50):
        path = scratch.create(f"sb-{number}", 64 * MIB)
        (path / "upper/deep/er").mkdir(parents=True)
        (path / "upper/deep/file").write_bytes(bytes(100_000))
    for number in range(50):
        scratch.destroy(f"sb-{number}")
        scratch.destroy(f"sb-{number}")
    assert scratch.list() == set()
    settle(scratch, lambda: quota_groups(scratch) == before)


@pytest.mark.slow
def test_an_image_shrinks_when_its_sandboxes_go(scratch):
    path = scratch.create("sb-1", None)
    assert write_until_refused(path / "upper/file", 100) == (100, None)
    os.sync()
    full = scratch.image.stat().st_blocks * 512
    assert full > 100 * MIB
    scratch.destroy("sb-1")
    settle(scratch, lambda: scratch.image.stat().st_blocks * 512 < full - 80 * MIB)


def test_one_sandbox_has_one_folder(scratch):
    scratch.create("sb-1", None)
    with pytest.raises(Conflict) as caught:
        scratch.create("sb-1", None)
    assert caught.value.field == "sandbox_id"
    assert sorted(os.listdir(scratch.path / "sb-1")) == ["upper", "work"]


@pytest.mark.parametrize("name", ["", "..", "a/b", ".", "x" * 129, "a\0b"])
def test_a_name_that_is_no_id_is_refused(scratch, name):
    for call in (lambda: scratch.create(name, None), lambda: scratch.destroy(name), lambda: scratch.usage(name)):
        with pytest.raises(InvalidArgument):
            call()
    assert scratch.list() == set()


@pytest.mark.parametrize("limit", [0, -1, 1000])
def test_a_limit_in_which_nothing_fits_is_refused(scratch, limit):
    with pytest.raises(InvalidArgument) as caught:
        scratch.create("sb-1", limit)
    assert caught.value.field == "disk_limit_mb"
    assert scratch.list() == set()


def test_threads_make_and_destroy_at_once(scratch):
    failures = []

    def work(worker):
        try:
            for number in range(50):
                scratch.create(f"sb-{worker}-{number}", 16 * MIB)
                scratch.destroy(f"sb-{worker}-{number}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert scratch.list() == set()


# -- the life of the image -----------------------------------------------------------------------------------------------------------


CRASH = """
import os, sys, signal
from pathlib import Path
from dsec.environments import ScratchStore
scratch = ScratchStore(Path(sys.argv[1]), Path(sys.argv[2]), size_bytes=256 << 20)
scratch.open()
(scratch.create("sb-1", 8 << 20) / "upper/kept").write_text("kept")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_after_a_crash_mount_and_folders_are_taken_over(state_run):
    process = subprocess.run([sys.executable, "-c", CRASH, str(state_run.state), str(state_run.run)], check=False)
    assert process.returncode == -9
    before = mount_at(state_run.state / "scratch")
    scratch = ScratchStore(state_run.state, state_run.run)
    scratch.open()
    try:
        assert mount_at(scratch.path) == before
        assert len(loop_devices_of(scratch.image)) == 1
        assert scratch.list() == {"sb-1"}
        assert (scratch.path / "sb-1/upper/kept").read_text() == "kept"
        assert write_until_refused(scratch.path / "sb-1/upper/file", 20)[1] == errno.EDQUOT
    finally:
        scratch.close(unmount=True)
    assert mount_at(scratch.path) is None
    assert loop_devices_of(scratch.image) == []


def test_a_closed_image_is_opened_again_with_what_it_held(state_run):
    scratch = ScratchStore(state_run.state, state_run.run, size_bytes=256 * MIB)
    scratch.open()
    scratch.open()
    (scratch.create("sb-1", 8 * MIB) / "upper/kept").write_text("kept")
    scratch.close(unmount=True)
    scratch.close(unmount=True)
    with pytest.raises(DSecError):
        scratch.create("sb-2", None)
    scratch.open()
    try:
        assert (scratch.path / "sb-1/upper/kept").read_text() == "kept"
        assert write_until_refused(scratch.path / "sb-1/upper/file", 20)[1] == errno.EDQUOT
    finally:
        scratch.close(unmount=True)


def test_an_image_that_another_mount_namespace_holds_is_opened_again(scratch):
    """Any container engine's, or a build's: it copied the mount table while we were open."""
    (scratch.create("sb-1", 8 * MIB) / "upper/kept").write_text("kept")
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", "echo ready; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"ready\n"
        scratch.close(unmount=True)
        assert len(loop_devices_of(scratch.image)) == 1
        scratch.open()
        assert (scratch.path / "sb-1/upper/kept").read_text() == "kept"
        assert write_until_refused(scratch.path / "sb-1/upper/file", 20)[1] == errno.EDQUOT
        assert len(loop_devices_of(scratch.image)) == 1
        holder.kill()


def test_closing_while_a_sandbox_uses_it_is_a_conflict(scratch):
    path = scratch.create("sb-1", None)
    with (path / "upper/open").open("w"):
        scratch.close()
        with pytest.raises(Conflict):
            scratch.close(unmount=True)
        assert mount_at(scratch.path) is not None


def test_an_image_that_a_crash_of_the_host_spoilt_is_made_anew(state_run, caplog):
    for turn in range(2):
        spoilt = os.urandom(MIB)
        (state_run.state / "scratch.img").write_bytes(spoilt)
        scratch = ScratchStore(state_run.state, state_run.run, size_bytes=256 * MIB)
        with caplog.at_level("WARNING"):
            scratch.open()
        assert (state_run.state / "scratch.img.spoilt").read_bytes() == spoilt, "the last one is kept"
        assert "scratch.img.spoilt" in caplog.text
        if turn == 0:
            scratch.close(unmount=True)
    try:
        assert scratch.list() == set()
        assert scratch.create("sb-1", 8 * MIB)
    finally:
        scratch.close(unmount=True)


@pytest.mark.slow
def test_a_full_scratch_store_is_a_typed_error(state_run):
    scratch = ScratchStore(state_run.state, state_run.run, size_bytes=128 * MIB)
    scratch.open()
    try:
        first = scratch.create("sb-1", None)
        written, why = write_until_refused(first / "upper/file", 200)
        assert (why, 50 < written < 128) == (errno.ENOSPC, True)
        made = []
        with pytest.raises(QuotaExceeded) as caught:
            made.extend(scratch.create(f"more-{number}", None).name for number in range(20_000))
        assert (caught.value.cause, caught.value.ran) == ("disk", "not-run")
        assert scratch.list() == {"sb-1", *made}
        scratch.destroy("sb-1")
    finally:
        scratch.close(unmount=True)


def test_a_folder_on_a_btrfs_with_quotas_is_used_as_it_is(scratch, state_run):
    inner = ScratchStore(state_run.state, state_run.run, path=scratch.path / "inner")
    inner.open()
    try:
        assert inner.capabilities.disk_limit
        assert not inner.capabilities.image
        path = inner.create("sb-1", 8 * MIB)
        assert write_until_refused(path / "upper/file", 20)[1] == errno.EDQUOT
        inner.destroy("sb-1")
    finally:
        inner.close(unmount=True)
    assert mount_at(scratch.path) is not None
    assert not inner.image.exists()


def test_where_no_image_can_be_made_folders_are_plain_and_a_limit_is_refused(state_run, tmp_path, monkeypatch):
    """A host without mkfs.btrfs."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "setpriv").symlink_to("/usr/bin/setpriv")
    monkeypatch.setenv("PATH", str(tools))
    scratch = ScratchStore(state_run.state, state_run.run, size_bytes=256 * MIB)
    scratch.open()
    try:
        assert not scratch.capabilities.disk_limit
        with pytest.raises(Unsupported) as caught:
            scratch.create("sb-1", 8 * MIB)
        assert caught.value.field == "disk_limit_mb"
        path = scratch.create("sb-1", None)
        (path / "upper/file").write_text("x")
        assert scratch.list() == {"sb-1"}
        assert scratch.usage("sb-1") is None
        scratch.destroy("sb-1")
        scratch.destroy("sb-1")
        assert scratch.list() == set()
    finally:
        scratch.close(unmount=True)


def test_a_size_that_is_too_small_is_refused(state_run):
    with pytest.raises(InvalidArgument) as caught:
        ScratchStore(state_run.state, state_run.run, size_bytes=MIB)
    assert caught.value.field == "scratch_size"
