"""The scratch store's snapshots by themselves: what is copied, what a crash leaves, what a full disk gives."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dsec.environments import ScratchStore
from dsec.environments.snapshots import ScratchSnapshots, forget_seeds
from dsec.kernel import btrfs
from libdsec.errors import Conflict, NotFound, QuotaExceeded, Unsupported

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def scratch(state_run):
    store = ScratchStore(state_run.state, state_run.run, size_bytes=256 << 20)
    store.open()
    yield store
    for sandbox_id in store.list():
        store.destroy(sandbox_id)
    for name in store.snapshots.names():
        store.snapshots.drop(name)
    store.close(unmount=True)


def write(folder, name: str, content: bytes) -> None:
    (folder / "upper" / name).write_bytes(content)


def test_a_snapshot_has_what_was_written_and_never_synced(scratch):
    folder = scratch.create("sb-a", None)
    write(folder, "file", b"one" * 5000)
    with scratch.snapshots.flushed("sb-a"):
        scratch.snapshots.take("sb-a", "snap", read_only=True)
    assert scratch.snapshots.names() == {"snap"}, "what flushed is dropped"
    write(folder, "file", b"two")
    assert (scratch.snapshots.path("snap") / "upper/file").read_bytes() == b"one" * 5000
    with pytest.raises(OSError, match="Read-only"):
        write(scratch.snapshots.path("snap"), "file", b"three")
    with pytest.raises(Conflict):
        scratch.snapshots.take("sb-a", "snap", read_only=True)


def test_branches_have_a_new_work_folder_and_a_limit_of_their_own(scratch):
    folder = scratch.create("sb-a", 8 << 20)
    write(folder, "file", os.urandom(5 << 20))
    (folder / "work/work/incompat/volatile").mkdir(parents=True)
    scratch.snapshots.take("sb-a", "snap", read_only=False)
    forgotten: list[list[str]] = []
    scratch.snapshots.branchable("snap", lambda upper: forgotten.append(os.listdir(upper)))
    assert forgotten == [["file"]]
    assert scratch.snapshots.branch("snap", {f"sb-b{number}": 6 << 20 for number in range(40)}) == {}
    scratch.snapshots.drop("snap")
    assert scratch.list() == {"sb-a", *(f"sb-b{number}" for number in range(40))}
    child = scratch.folder("sb-b7")
    assert os.listdir(child / "work") == []
    assert (child / "upper/file").read_bytes() == (folder / "upper/file").read_bytes()
    write(child, "own", os.urandom(5 << 20))
    with pytest.raises(OSError, match="quota"):
        write(child, "more", os.urandom(5 << 20))


def test_what_a_crash_left_in_the_lanes_goes_at_the_next_start(scratch, state_run):
    folder = scratch.create("sb-a", None)
    source = os.open(folder, os.O_RDONLY)
    lane = os.open(scratch.path / ".lanes/3", os.O_RDONLY)
    btrfs.create_snapshot(source, lane, "sb-half", read_only=False)
    os.close(source)
    os.close(lane)
    again = ScratchStore(state_run.state, state_run.run)
    again.open()
    assert os.listdir(scratch.path / ".lanes/3") == []
    assert again.list() == {"sb-a"}
    again.close()


def test_a_full_disk_is_said_so_and_nothing_half_is_left(scratch):
    folder = scratch.create("sb-a", None)
    write(folder, "file", b"x")
    with pytest.raises(OSError, match="No space"):
        fill(folder)
    failed: dict[str, Exception] = {}
    try:
        scratch.snapshots.take("sb-a", "snap", read_only=False)
    except QuotaExceeded as error:
        failed["sb-a"] = error
        assert "snap" not in scratch.snapshots.names()
    else:
        failed |= scratch.snapshots.branch("snap", {f"sb-b{number}": None for number in range(64)})
        assert scratch.list() == {"sb-a"} | ({f"sb-b{number}" for number in range(64)} - failed.keys())
    assert {(type(error), error.cause) for error in failed.values()} <= {(QuotaExceeded, "disk")}


def fill(folder) -> None:
    write(folder, "big", os.urandom(1 << 20) * 400)
    for number in range(20000):
        write(folder, f"small-{number}", b"y" * 1500)


def test_the_interpreter_goes_on_while_a_snapshot_waits_for_the_disk(scratch):
    """What btrfs takes as a large argument must not be waited for with the interpreter's lock held."""
    folder = scratch.create("sb-a", None)
    write(folder, "big", os.urandom(60 << 20))
    turns, over = 0, threading.Event()

    def take() -> None:
        scratch.snapshots.take("sb-a", "snap", read_only=True)
        over.set()

    thread = threading.Thread(target=take)
    thread.start()
    while not over.is_set():
        turns += 1
    thread.join()
    assert turns > 1000


def test_names_and_owners_are_checked(scratch):
    with pytest.raises(NotFound):
        scratch.snapshots.take("sb-nobody", "snap", read_only=True)
    scratch.snapshots.drop("nothing")
    plain = ScratchSnapshots(scratch.path, scratch._open_fd, able=lambda: False)
    assert plain.names() == set()
    with pytest.raises(Unsupported):
        plain.take("sb-a", "snap", read_only=True)


def test_an_image_of_an_earlier_life_of_the_host_is_made_anew(scratch, state_run):
    write(scratch.create("sb-a", None), "file", b"x")
    scratch.close(unmount=True)
    scratch.open()
    assert scratch.list() == {"sb-a"}, "in the same life it is kept"
    scratch.close(unmount=True)
    (state_run.state / "scratch.boot").write_text("another\n")
    scratch.open()
    assert scratch.list() == set()


def test_what_lies_in_a_snapshot_s_place_is_dropped_whatever_it_is(scratch):
    (scratch.path / ".snapshots/plain/deep").mkdir(parents=True)
    (scratch.path / ".snapshots/file").write_text("x")
    (scratch.path / ".snapshots/link").symlink_to(scratch.path)
    (scratch.path / ".lanes/3/left/over").mkdir(parents=True)
    for name in ("plain", "file", "link"):
        scratch.snapshots.drop(name)
    scratch.snapshots.prepare()
    assert scratch.snapshots.names() == set()
    assert os.listdir(scratch.path / ".lanes/3") == []


def test_quota_groups_of_parents_that_died_before_their_forks_are_tidied_away(scratch):
    fd = os.open(scratch.path, os.O_RDONLY)
    try:
        groups = btrfs.qgroup_ids(btrfs.filesystem_id(fd))
        for number in range(5):
            folder = scratch.create(f"sb-p{number}", 32 << 20)
            write(folder, "file", os.urandom(4 << 20))
            scratch.snapshots.take(f"sb-p{number}", f"snap{number}", read_only=False)
            assert scratch.snapshots.branch(f"snap{number}", {f"sb-c{number}": 32 << 20}) == {}
            scratch.snapshots.drop(f"snap{number}")
            scratch.destroy(f"sb-p{number}")
        settle(lambda: btrfs.sync(fd) or len(os.listdir(scratch.path)) == 7)
        scratch.tidy()
        assert len(btrfs.qgroup_ids(btrfs.filesystem_id(fd))) >= len(groups) + 5, "what is alive keeps its limit"
        for number in range(5):
            scratch.destroy(f"sb-c{number}")

        def tidied() -> bool:
            btrfs.sync(fd)
            scratch.tidy()
            return btrfs.qgroup_ids(btrfs.filesystem_id(fd)) == groups

        settle(tidied)
    finally:
        os.close(fd)


def test_copies_that_only_write_out_are_nobody_s_snapshots_and_end_when_told(scratch):
    folder = scratch.create("sb-a", None)
    write(folder, "file", os.urandom(8 << 20))
    with scratch.snapshots.flushed("sb-a"):
        assert any(name.startswith("flush-") for name in os.listdir(scratch.path / ".snapshots"))
        assert scratch.snapshots.names() == set()
    with scratch.snapshots.flushed("sb-a", lambda: True):
        assert os.listdir(scratch.path / ".snapshots") == []


def test_seeds_are_looked_for_in_layers_without_following_their_links(scratch, tmp_path):
    outside, lower, upper = tmp_path / "outside", tmp_path / "lower", tmp_path / "upper"
    (outside / "systemd").mkdir(parents=True)
    (outside / "systemd/random-seed").write_bytes(b"host")
    (lower / "var").mkdir(parents=True)
    (lower / "var/lib").symlink_to(outside)
    (upper / "var/lib/systemd").mkdir(parents=True)
    (upper / "var/lib/systemd/random-seed").write_bytes(b"own")
    fd = os.open(upper, os.O_RDONLY)
    try:
        forget_seeds(fd, [lower])
    finally:
        os.close(fd)
    assert os.listdir(upper / "var/lib/systemd") == []


def settle(done, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
