"""A store that is damaged or full, and builds that die: a typed error naming the layer, nothing mounted, nothing visible, nothing left."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from trees import fill

from dsec.environments import ScratchStore, build
from dsec.environments.environment import EnvironmentStore
from dsec.environments.store import DATA, MANIFEST, METADATA
from dsec.kernel.mountinfo import mounts_below
from libdsec.errors import DSecError, NotFound, QuotaExceeded, SandboxFailed

pytestmark = pytest.mark.root


@pytest.fixture
def base(store, tmp_path):
    fill(tmp_path / "base")
    return build(store, "base", source=f"dir:{tmp_path / 'base'}")


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def damage_metadata(folder):
    flip(folder / METADATA, 5000)


def damage_superblock(folder):
    flip(folder / METADATA, 1024)


def truncate_metadata(folder):
    os.truncate(folder / METADATA, 100)


def truncate_data(folder):
    os.truncate(folder / DATA, (folder / DATA).stat().st_size - 4096)


def lose_data(folder):
    (folder / DATA).unlink()


def lose_folder(folder):
    shutil.rmtree(folder)


@pytest.mark.parametrize("spoil", [damage_metadata, damage_superblock, truncate_metadata, truncate_data, lose_data, lose_folder])
def test_a_damaged_layer_is_named_and_nothing_is_mounted(state_run, store, base, spoil):
    fresh = EnvironmentStore(state_run.state / "elsewhere", state_run.run, store.layers.root)
    digests = fresh.resolve(["base"]).digests
    spoil(store.layers.folder(base.digest))
    with pytest.raises(SandboxFailed, match=base.digest) as caught:
        fresh.acquire(digests, "sb-1")
    assert (caught.value.cause, caught.value.field, caught.value.ran) == ("store-lost", "environment", "not-run")
    assert mounts_below(state_run.run) == []
    assert fresh.node.uses() == {}


def test_a_store_that_stalls_is_a_typed_error_in_time(state_run, store, base):
    """A fifo that nobody writes to blocks its reader as a dead server does."""
    metadata = store.layers.folder(base.digest) / METADATA
    metadata.rename(metadata.with_name("away"))
    os.mkfifo(metadata)
    fresh = EnvironmentStore(state_run.state / "elsewhere", state_run.run, store.layers.root, store_deadline_seconds=0.05)
    with pytest.raises(SandboxFailed, match="did not answer") as caught:
        fresh.acquire([base.digest], "sb-1")
    assert (caught.value.cause, caught.value.ran) == ("store-lost", "not-run")
    os.close(os.open(metadata, os.O_WRONLY))
    metadata.unlink()
    metadata.with_name("away").rename(metadata)
    patient = EnvironmentStore(state_run.state / "elsewhere", state_run.run, store.layers.root)
    assert patient.acquire([base.digest], "sb-1")


def test_a_manifest_that_was_changed_is_not_believed(state_run, store, base):
    path = store.layers.folder(base.digest) / MANIFEST
    path.write_text(path.read_text().replace('"kind": "base"', '"kind": "toolkit"'))
    fresh = EnvironmentStore(state_run.state, state_run.run)
    with pytest.raises(SandboxFailed, match=base.digest) as caught:
        fresh.resolve(["base"])
    assert caught.value.cause == "store-lost"
    [listed] = fresh.list()
    assert "damaged" in listed.source


def test_a_damaged_copy_on_the_node_is_made_anew(store, base):
    [path] = store.acquire([base.digest], "sb-1")
    store.sweep_mounts([])
    flip(store.state / "layers" / f"{base.digest[7:]}.erofs", 5000)
    assert store.acquire([base.digest], "sb-1") == [path]
    assert os.path.exists(f"{path}/a/file")


def test_building_again_mends_a_damaged_layer(store, base, tmp_path):
    truncate_data(store.layers.folder(base.digest))
    assert store.layers.damage(base.digest) is not None
    assert build(store, "base", source=f"dir:{tmp_path / 'base'}").digest == base.digest
    assert store.layers.damage(base.digest) is None
    assert store.acquire([base.digest], "sb-1")


def test_a_tag_that_is_garbage_is_a_typed_error(store, base):
    (store.layers.root / "tags/base/latest").write_text("garbage")
    with pytest.raises(DSecError) as caught:
        store.resolve(["base"])
    assert caught.value.field == "environment"


BUILD = """
import sys
from pathlib import Path
from dsec.environments import EnvironmentStore, build
def progress(step):
    if step.phase == sys.argv[4]:
        print("there", flush=True)
        sys.stdin.read()
build(EnvironmentStore(Path(sys.argv[1]), Path(sys.argv[2])), "base", source="dir:" + sys.argv[3], progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["fetch", "image", "digest", "publish"])
def test_a_build_that_is_killed_leaves_nothing_visible_and_a_sweep_takes_the_rest(store, full_tree, phase):
    arguments = [sys.executable, "-c", BUILD, str(store.state), str(store.run), str(full_tree), phase]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"there\n"
        assert store.sweep_builds() == []
        process.send_signal(signal.SIGKILL)
    assert store.list() == []
    assert store.layers.layers() == set()
    with pytest.raises(NotFound):
        store.resolve(["base"])
    assert len(store.sweep_builds()) == 2
    for folder in (store.layers.building.root, store.staging.root):
        assert os.listdir(folder) == []


@pytest.mark.slow
def test_a_tool_of_a_build_that_is_killed_dies_with_it(store, tmp_path, full_tree):
    """A tool that never ends stands in for one that is in the middle."""
    stuck = tmp_path / "bin"
    stuck.mkdir()
    pid_file = tmp_path / "pid"
    (stuck / "mkfs.erofs").write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 1000\n")
    (stuck / "mkfs.erofs").chmod(0o755)
    arguments = [sys.executable, "-c", BUILD, str(store.state), str(store.run), str(full_tree), "never"]
    environment = {**os.environ, "PATH": f"{stuck}:{os.environ['PATH']}"}
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, env=environment) as process:
        deadline = time.monotonic() + 30
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        tool = os.pidfd_open(int(pid_file.read_text()))
        process.send_signal(signal.SIGKILL)
    try:
        assert select.select([tool], [], [], 10)[0], "mkfs.erofs outlives the build"
    finally:
        os.close(tool)
    assert len(store.sweep_builds()) == 2


def test_a_tool_that_fails_says_what_it_said(store, full_tree, tmp_path, monkeypatch):
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "mkfs.erofs").write_text("#!/bin/sh\necho the reason >&2\nexit 3\n")
    (broken / "mkfs.erofs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:{os.environ['PATH']}")
    with pytest.raises(DSecError, match="the reason") as caught:
        build(store, "base", source=f"dir:{full_tree}")
    assert caught.value.cause == "tool-failed"
    assert store.list() == []
    assert os.listdir(store.staging.root) == []


@pytest.mark.slow
@pytest.mark.parametrize("full", ["state", "store"])
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(state_run, tmp_path, full):
    """A scratch folder with a limit is a small disk."""
    scratch = ScratchStore(state_run.state, state_run.run, size_bytes=256 << 20)
    scratch.open()
    try:
        small = scratch.create("small", 8 << 20) / "upper"
        places = {"state": small, "store": state_run.state / "store"} if full == "state" else {"state": state_run.state, "store": small}
        store = EnvironmentStore(places["state"], state_run.run, places["store"])
        tree = tmp_path / "big"
        tree.mkdir()
        (tree / "noise").write_bytes(os.urandom(16 << 20))
        with pytest.raises(QuotaExceeded) as caught:
            build(store, "big", source=f"dir:{tree}")
        assert caught.value.cause == "disk"
        assert store.list() == []
        assert os.listdir(store.layers.building.root) == []
        assert os.listdir(store.staging.root) == []
    finally:
        scratch.close(unmount=True)
