"""A store that is damaged or full, and builds that die: a typed error naming the layer, nothing mounted, nothing visible, nothing left."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from trees import fill

from dsec.environments import ScratchStore, build
from dsec.environments.environment import EnvironmentStore
from dsec.environments.store import MANIFEST, METADATA
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


def spoil_manifest(folder):
    (folder / MANIFEST).write_bytes(b"\xff{")


def lose_manifest(folder):
    (folder / MANIFEST).unlink()


def pack(folder):
    [found] = (folder.parent.parent / "packs").glob("*.data")
    return found


def truncate_pack(folder):
    os.truncate(pack(folder), pack(folder).stat().st_size - 4096)


def lose_pack(folder):
    pack(folder).unlink()


def lose_folder(folder):
    shutil.rmtree(folder)


SPOILERS = [damage_metadata, damage_superblock, truncate_metadata, spoil_manifest, lose_manifest, truncate_pack, lose_pack, lose_folder]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_damaged_layer_is_named_and_nothing_is_mounted(state_run, store, base, spoil):
    fresh = EnvironmentStore(state_run.state / "elsewhere", state_run.run, store.layers.root)
    digests = store.resolve(["base"]).digests
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


@pytest.mark.parametrize("spoil", SPOILERS)
def test_building_again_mends_a_damaged_layer(store, base, tmp_path, spoil):
    spoil(store.layers.folder(base.digest))
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
build(EnvironmentStore(Path(sys.argv[1]), Path(sys.argv[2])), "base", source=sys.argv[3], progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["fetch", "merge", "publish"])
def test_a_build_that_is_killed_leaves_nothing_visible_and_a_sweep_takes_the_rest(store, full_tree, phase):
    arguments = [sys.executable, "-c", BUILD, str(store.state), str(store.run), f"dir:{full_tree}", phase]
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
def test_a_tool_of_a_build_that_is_killed_dies_with_it(store, tmp_path):
    """A tool that never ends stands in for one that is in the middle."""
    stuck = tmp_path / "bin"
    stuck.mkdir()
    held = tmp_path / "held"
    held.touch()
    # by its lock, not its pid: it is in a pid namespace of its own
    (stuck / "mmdebstrap").write_text(f"#!/bin/sh\nexec 9<{held}\nflock 9\nexec sleep 1000\n")
    (stuck / "mmdebstrap").chmod(0o755)
    arguments = [sys.executable, "-c", BUILD, str(store.state), str(store.run), "debian:bookworm", "never"]
    environment = {**os.environ, "PATH": f"{stuck}:{os.environ['PATH']}"}
    with held.open() as file:

        def until_lock_is(expected):
            deadline = time.monotonic() + 30
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free = True
                    fcntl.flock(file, fcntl.LOCK_UN)
                except BlockingIOError:
                    free = False
                if free == expected:
                    return
                assert time.monotonic() < deadline, f"the lock never became {'free' if expected else 'held'}"
                time.sleep(0.01)

        with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, env=environment) as process:
            until_lock_is(False)
            process.send_signal(signal.SIGKILL)
        until_lock_is(True)
    assert len(store.sweep_builds()) == 2


def test_a_tool_that_fails_says_what_it_said(store, tmp_path, monkeypatch):
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "mmdebstrap").write_text("#!/bin/sh\necho the reason >&2\nexit 3\n")
    (broken / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:{os.environ['PATH']}")
    with pytest.raises(DSecError, match="the reason") as caught:
        build(store, "base", source="debian:bookworm")
    assert caught.value.cause == "tool-failed"
    assert store.list() == []
    assert os.listdir(store.staging.root) == []


@pytest.mark.slow
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(state_run, tmp_path):
    """A scratch folder with a limit is a small disk."""
    scratch = ScratchStore(state_run.state, state_run.run, size_bytes=256 << 20)
    scratch.open()
    try:
        small = scratch.create("small", 8 << 20) / "upper"
        store = EnvironmentStore(state_run.state, state_run.run, small)
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
