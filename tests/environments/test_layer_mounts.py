"""Mounted once a node, counted by owner, found again by whoever comes next."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from trees import describe, fill

from dsec.environments import EnvironmentStore, build
from dsec.kernel.loop import loop_devices_of
from dsec.kernel.mountinfo import mounts_below
from dsec.kernel.mounts import attach, make_mount, unmount
from libdsec.errors import Conflict, InvalidArgument, NotFound

pytestmark = pytest.mark.root


@pytest.fixture
def base(store, tmp_path):
    fill(tmp_path / "base")
    return build(store, "base", source=f"dir:{tmp_path / 'base'}")


def mount_ids(store):
    return [mount.mount_id for mount in mounts_below(store.run / "layers")]


def test_many_owners_share_one_mount_and_the_last_to_go_frees_it(store, base):
    paths = {tuple(store.acquire([base.digest], f"sb-{number}")) for number in range(5)}
    assert paths == {(str(store.run / "layers" / base.digest[7:19]),)}
    assert len(mount_ids(store)) == 1
    assert store.show("base").mounted == 5
    for number in range(4):
        store.release(f"sb-{number}")
        store.release(f"sb-{number}")
    assert store.sweep_mounts([f"sb-{number}" for number in range(5)]) == []
    store.release("sb-4")
    assert len(mount_ids(store)) == 1
    assert store.sweep_mounts(["sb-4"]) == [base.digest]
    assert mount_ids(store) == []
    assert os.listdir(store.run / "layers") == []


def test_the_next_process_finds_mounts_and_owners(store, base, state_run):
    [path] = store.acquire([base.digest], "sb-1")
    before = mount_ids(store)
    restarted = EnvironmentStore(state_run.state, state_run.run)
    assert restarted.show("base").mounted == 1
    assert restarted.acquire([base.digest], "sb-1") == [path]
    assert mount_ids(store) == before
    with pytest.raises(Conflict):
        restarted.remove("base")
    restarted.release("sb-1")
    assert restarted.sweep_mounts([]) == [base.digest]
    # the first one notices that its mount is gone, and mounts again
    assert store.acquire([base.digest], "sb-2") == [path]
    assert os.path.exists(f"{path}/a/file")


def test_a_sweep_forgets_owners_that_are_dead(store, base):
    store.acquire([base.digest], "sb-dead")
    store.acquire([base.digest], "sb-alive")
    assert store.sweep_mounts(lambda: {"sb-alive"}) == []
    assert store.show("base").mounted == 1


def test_a_layer_in_use_is_not_removed(store, base):
    store.acquire([base.digest], "sb-1")
    with pytest.raises(Conflict, match="sb-1") as caught:
        store.remove("base")
    assert (caught.value.field, caught.value.cause) == ("name", "in-use")
    assert store.resolve(["base"]).digests == [base.digest]
    store.release("sb-1")
    store.remove("base")
    assert store.list() == []
    assert store.collect_garbage(grace_seconds=0).layers == [base.digest]
    assert mount_ids(store) == []
    assert os.listdir(store.layers.root / "layers") == []
    assert os.listdir(store.state / "layers") == []
    with pytest.raises(NotFound):
        store.remove("base")


def test_a_layer_with_two_names_lives_until_the_second_goes(store, base, tmp_path):
    build(store, "again", source=f"dir:{tmp_path / 'base'}", tag="v2")
    store.remove("base")
    assert store.resolve(["again:v2"]).digests == [base.digest]
    assert [info.name for info in store.list()] == ["again:v2"]
    store.remove(f"again@{base.digest}")
    assert store.list() == []
    assert store.collect_garbage(grace_seconds=0).layers == [base.digest]
    assert store.layers.layers() == set()


def test_of_two_removals_at_once_one_succeeds(store, base):
    barrier, outcomes = threading.Barrier(2), []

    def remove():
        barrier.wait()
        try:
            store.remove("base")
            outcomes.append("removed")
        except NotFound:
            outcomes.append("not found")

    threads = [threading.Thread(target=remove) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["not found", "removed"]


def test_threads_that_acquire_at_once_make_one_mount(store, base):
    barrier, paths = threading.Barrier(8), []

    def acquire(number):
        barrier.wait()
        paths.extend(store.acquire([base.digest], f"sb-{number}"))

    threads = [threading.Thread(target=acquire, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8
    assert len(mount_ids(store)) == 1


@pytest.mark.slow
def test_processes_that_acquire_at_once_make_one_mount(store, base):
    script = (
        "import sys; from pathlib import Path; from dsec.environments import EnvironmentStore\n"
        "store = EnvironmentStore(Path(sys.argv[1]), Path(sys.argv[2])); sys.stdin.read(1)\n"
        "print(store.acquire([sys.argv[3]], sys.argv[4])[0])"
    )
    arguments = [sys.executable, "-c", script, str(store.state), str(store.run), base.digest]
    processes = [
        subprocess.Popen([*arguments, f"sb-{number}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for number in range(3)
    ]
    said = {process.communicate("x", timeout=60)[0] for process in processes}
    assert said == {f"{store.run}/layers/{base.digest[7:19]}\n"}
    assert len(mount_ids(store)) == 1
    assert store.show("base").mounted == 3


def test_an_acquired_layer_costs_no_look_at_the_store(store, base, state_run):
    """Nor does it after a restart: sandboxes are adopted while the store is away."""
    paths = store.acquire([base.digest], "sb-1")
    hidden = store.layers.root.with_name("store-away")
    store.layers.root.rename(hidden)
    try:
        assert store.acquire([base.digest], "sb-2") == paths
        restarted = EnvironmentStore(state_run.state, state_run.run)
        assert restarted.acquire([base.digest], "sb-1") == paths
    finally:
        hidden.rename(store.layers.root)


def test_a_node_that_has_the_metadata_mounts_it_from_its_own_copy(store, base):
    store.acquire([base.digest], "sb-1")
    [mount] = mounts_below(store.run / "layers")
    assert mount.source == str(store.state / "layers" / f"{base.digest[7:]}.erofs")
    assert mount.kind == "erofs"


def test_two_nodes_share_a_store(store, base, state_run):
    other = EnvironmentStore(state_run.state / "other", state_run.run / "other", store.layers.root)
    [path] = other.acquire(other.resolve(["base"]).digests, "sb-1")
    assert (state_run.state / "other/layers" / f"{base.digest[7:]}.erofs").exists()
    assert os.path.exists(f"{path}/a/file")
    other.sweep_mounts([])


def resident(path):
    """Bytes of a file that are in memory."""
    return int(subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "RES", path], check=True, capture_output=True).stdout)


@pytest.mark.slow
def test_a_node_that_never_saw_an_environment_reads_its_metadata_alone(store, tmp_path, state_run):
    names = []
    for kind in ("base", "workspace", "toolkit"):
        tree = tmp_path / kind
        tree.mkdir()
        for number in range(20):
            (tree / f"{kind}-{number}").write_bytes(os.urandom(400_000))
        build(store, kind, source=f"dir:{tree}", kind=kind, dest=None if kind == "base" else f"/{kind}")
        names.append(kind)
    packs = list(store.layers.packs.folder.glob("*.data"))
    total = sum(path.stat().st_size for path in packs)
    for path in packs:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    other = EnvironmentStore(state_run.state / "other", state_run.run / "other", store.layers.root)
    paths = other.acquire(other.resolve(names).digests, "sb-1")
    try:
        assert sum(map(resident, packs)) < total * 0.01
        copied = sum(path.stat().st_size for path in (state_run.state / "other/layers").iterdir())
        assert copied < total * 0.02
        assert len(Path(paths[1], "workspace/workspace-3").read_bytes()) == 400_000
        assert 0 < sum(map(resident, packs)) < total * 0.2
    finally:
        other.sweep_mounts([])


def test_an_overlay_takes_a_layer_with_its_whiteouts_and_set_uid_files(store, base, tmp_path):
    """What a sandbox sees does not go by the flags of the layer's own mount."""
    above = tmp_path / "above"
    (above / "a/b").mkdir(parents=True)
    os.setxattr(above / "a/b", "trusted.overlay.opaque", b"y")
    (above / "a/b/only").touch()
    os.mknod(above / ".hidden", 0o020000, 0)
    build(store, "above", source=f"dir:{above}", kind="toolkit", dest="/")
    lower, upper = store.acquire(store.resolve(["base", "above"]).digests, "sb-1")
    target = tmp_path / "merged"
    target.mkdir()
    mount = make_mount("overlay", options=[("lowerdir+", upper), ("lowerdir+", lower)])
    attach(mount, target)
    os.close(mount)
    try:
        assert os.listdir(target / "a/b") == ["only"]
        assert not (target / ".hidden").exists()
        assert (target / "set-uid").stat().st_mode & 0o7777 == 0o6755
        assert not os.statvfs(target).f_flag & os.ST_NOSUID
        assert (target / "null").read_bytes() == b""
    finally:
        unmount(target)


def test_a_state_folder_that_cannot_be_mounted_from_goes_through_loop_devices(store, base, state_run, tmp_path):
    """tmpfs is one; so is every file system before Linux 6.12."""
    memory = tmp_path / "memory"
    memory.mkdir()
    mount = make_mount("tmpfs")
    attach(mount, memory)
    os.close(mount)
    try:
        node = EnvironmentStore(memory / "state", memory / "run", store.layers.root)
        [path] = node.acquire([base.digest], "sb-1")
        assert describe(path) == describe(store.acquire([base.digest], "sb-1")[0])
        again = EnvironmentStore(memory / "state", memory / "run", store.layers.root)
        assert again.acquire([base.digest], "sb-2") == [path]
        assert len(mounts_below(memory)) == 1
        image = memory / f"state/layers/{base.digest[7:]}.erofs"
        assert len(loop_devices_of(image)) == 1
        assert again.sweep_mounts([]) == [base.digest]
        assert loop_devices_of(image) == []
    finally:
        for below in reversed(mounts_below(memory)):
            unmount(below.target)
        unmount(memory)


@pytest.mark.slow
def test_two_hundred_layers_are_built_resolved_and_mounted(store, tmp_path, base):
    names = ["base"]
    for number in range(199):
        tree = tmp_path / f"layer-{number}"
        tree.mkdir()
        (tree / f"file-{number}").write_text(str(number))
        build(store, f"tool-{number}", source=f"dir:{tree}", kind="toolkit", dest="/opt")
        names.append(f"tool-{number}")
    digests = store.resolve(names).digests
    started = time.perf_counter()
    paths = store.acquire(digests, "sb-1")
    cold = time.perf_counter() - started
    assert len(set(paths)) == 200
    assert [Path(path, f"opt/file-{number}").read_text() for number, path in enumerate(paths[1:])] == [str(n) for n in range(199)]
    assert store.acquire(digests, "sb-2") == paths
    assert cold < 10
    assert all(info.mounted == 2 for info in store.list())


@pytest.mark.parametrize("owner", ["", "../x", "a/b", "."])
def test_an_owner_that_is_no_id_is_refused(store, base, owner):
    with pytest.raises(InvalidArgument):
        store.acquire([base.digest], owner)
    assert mount_ids(store) == []
