"""Tags move and keep their history; references bring along what their layers are differences to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from layering import noise, publish_files

from dsec.environments import EnvironmentStore
from dsec.environments.manifest import Configuration
from dsec.environments.names import parse_reference
from libdsec.errors import Conflict, InvalidArgument, NotFound, SandboxFailed

pytestmark = pytest.mark.root


def layer(store, name, number, **settings):
    return publish_files(store, name, {"f": noise(number, 1000)}, **settings)


def test_a_tag_tells_what_it_meant_and_since_when(store):
    before = time.time()
    made = [layer(store, "env", number).digest for number in (1, 2, 1)]
    layer(store, "env", 1)
    history = store.history("env")
    assert [entry.digest for entry in history] == made
    assert before - 1 < history[0].since <= history[1].since <= history[2].since <= time.time() + 1
    assert store.resolve(["env"]).digests == [made[0]]
    assert store.resolve([f"env@{made[1]}"]).digests == [made[1]]
    with pytest.raises(NotFound):
        store.history("nothing")


def test_a_history_has_an_end(store):
    digests = [layer(store, "", number).digest for number in range(2)]
    for number in range(300):
        store.layers.tags.put(parse_reference("env"), digests[number % 2])
    history = store.history("env")
    assert len(history) == 256
    assert history[-1].digest == digests[1]


MOVE = """
import sys
from pathlib import Path
from dsec.environments import EnvironmentStore
from dsec.environments.names import parse_reference
store = EnvironmentStore(Path(sys.argv[1]), Path(sys.argv[2]))
sys.stdin.read(1)
for number in range(20):
    store.layers.tags.put(parse_reference("env"), sys.argv[3 + number % 2])
"""


@pytest.mark.slow
def test_processes_that_move_a_tag_at_once_lose_no_line(store):
    digests = [layer(store, "", number).digest for number in range(6)]
    processes = [
        subprocess.Popen([sys.executable, "-c", MOVE, store.state, store.run, *digests[at : at + 2]], stdin=subprocess.PIPE)
        for at in (0, 2, 4)
    ]
    for process in processes:
        process.communicate(b"x", timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    history = [entry.digest for entry in store.history("env")]
    for at in (0, 2, 4):
        assert [digest for digest in history if digest in digests[at : at + 2]] == digests[at : at + 2] * 10


@pytest.mark.parametrize("text", ["", "garbage", "sha256:" + "0" * 63 + " 1\n", "sha256:" + "0" * 64 + " soon\n", "\xff\n"])
def test_a_damaged_tag_is_told_and_can_be_replaced_or_removed(store, text):
    digest = layer(store, "env", 1).digest
    path = store.layers.root / "tags/env/latest"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SandboxFailed, match="env") as caught:
        store.resolve(["env"])
    assert (caught.value.cause, caught.value.field) == ("store-lost", "environment")
    assert store.list() == []
    layer(store, "env", 1)
    assert store.resolve(["env"]).digests == [digest]
    path.write_bytes(text.encode("latin-1"))
    store.remove("env")
    with pytest.raises(NotFound):
        store.resolve(["env"])


@pytest.mark.parametrize("reference", ["env", "env@sha256:" + "0" * 64])
def test_an_empty_mount_point_is_not_taken_for_a_store_without_names(store, reference):
    layer(store, "env", 1)
    store.layers.root.rename(store.state / "away")
    store.layers.root.mkdir()
    try:
        with pytest.raises(SandboxFailed, match="not mounted") as caught:
            store.resolve([reference])
        assert (caught.value.cause, caught.value.ran) == ("store-lost", "not-run")
    finally:
        store.layers.root.rmdir()
        (store.state / "away").rename(store.layers.root)
    assert store.resolve(["env"])


@pytest.mark.parametrize("reference", ["env", "env@sha256:" + "0" * 64])
def test_a_store_that_gives_errors_is_a_typed_error(store, reference):
    """A loop of links stands for an input/output error."""
    for name in ("tags", "layers"):
        (store.layers.root / name).rmdir()
        (store.layers.root / name).symlink_to(name)
    try:
        with pytest.raises(SandboxFailed) as caught:
            store.resolve([reference])
        assert caught.value.cause == "store-lost"
    finally:
        for name in ("tags", "layers"):
            (store.layers.root / name).unlink()


def test_removing_by_digest_takes_all_names_and_one_name_only_itself(store):
    digest = layer(store, "one", 1).digest
    layer(store, "two", 1)
    store.acquire([digest], "sb-1")
    store.remove("one")
    assert [info.name for info in store.list()] == ["two"]
    with pytest.raises(Conflict):
        store.remove("two")
    with pytest.raises(Conflict):
        store.remove(f"two@{digest}")
    store.release("sb-1")
    store.remove(f"two@{digest}")
    assert store.list() == []
    with pytest.raises(NotFound):
        store.remove(f"two@{digest}")


def test_a_snapshot_brings_what_lies_below_it_and_counts_as_the_lowest(store):
    base = layer(store, "base", 1, configuration=Configuration(env={"A": "1", "B": "1"}, workdir="/base", user="one"))
    work = layer(store, "work", 2, kind="workspace", configuration=Configuration(env={"B": "2"}, workdir="/work"))
    snap = layer(store, "snap", 3, kind="snapshot", below=[base.digest, work.digest])
    tool = layer(store, "tool", 4, kind="toolkit", configuration=Configuration(env={"C": "3"}))
    over = layer(store, "tool-snap", 5, kind="snapshot", below=[tool.digest])
    resolved = store.resolve(["snap", "tool-snap"])
    assert resolved.digests == [each.digest for each in (base, work, snap, tool, over)]
    assert [each.name for each in resolved.layers] == ["base", "work", "snap", "tool", "tool-snap"]
    assert (resolved.env, resolved.workdir, resolved.user) == ({"A": "1", "B": "2", "C": "3"}, "/work", "one")
    for wrong in (["tool-snap"], ["base", "snap"], ["snap", "work"], ["tool-snap", "snap"], ["snap", "snap"]):
        with pytest.raises(InvalidArgument) as caught:
            store.resolve(wrong)
        assert caught.value.field == "environment"


def test_a_snapshot_of_nothing_stands_nowhere(store):
    layer(store, "base", 1)
    layer(store, "snap", 2, kind="snapshot")
    for wrong in (["snap"], ["base", "snap"]):
        with pytest.raises(InvalidArgument):
            store.resolve(wrong)


def test_what_a_snapshot_stands_on_may_be_lost(store):
    base = layer(store, "base", 1)
    layer(store, "snap", 2, kind="snapshot", below=[base.digest])
    (store.layers.folder(base.digest) / "manifest.json").write_bytes(b"")
    with pytest.raises(SandboxFailed, match=base.digest) as caught:
        EnvironmentStore(store.state, store.run).resolve(["snap"])
    assert caught.value.cause == "store-lost"


def test_two_builds_of_one_tree_at_once_make_one_layer(store):
    files = {f"f{number}": noise(number, 50_000) for number in range(20)}
    barrier, made = threading.Barrier(4), []

    def build():
        barrier.wait()
        made.append(publish_files(store, "env", files).digest)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert len(os.listdir(store.layers.packs.folder)) == 2
    assert store.verify().damages == []
    assert os.listdir(store.layers.building.root) == []
