"""What nothing refers to goes, when it has been so for the time of grace; what something refers to stays."""

from __future__ import annotations

import fcntl
import os

import pytest
from layering import noise, publish_files, read_files

from dsec.environments import EnvironmentStore
from dsec.environments.names import parse_reference
from dsec.environments.packs import ContentsLost, KnownContents, Packer
from dsec.environments.publish import draft_tree, import_of, publish_drafts
from dsec.environments.trees.model import Node, folder
from dsec.environments.unused import Inventory, LayerReferences, find_unused
from libdsec.errors import SandboxFailed

pytestmark = pytest.mark.root

ONE, TWO, THREE = noise(1, 10_000), noise(2, 20_000), noise(3, 30_000)


def left(store):
    """Layers, packs' files and marks, and that no folder of a build is left."""
    root = store.layers.root
    assert os.listdir(root / "building") == []
    return store.layers.layers(), len(os.listdir(root / "packs")), len(os.listdir(root / "condemned"))


def age(store, seconds):
    """As if everything had been done so long ago."""
    for top in ("condemned", "packs", "imports", "holders"):
        for parent, _, names in os.walk(store.layers.root / top):
            for name in names:
                path = os.path.join(parent, name)
                changed = os.stat(path).st_mtime - seconds
                os.utime(path, (changed, changed))


def test_a_layer_that_lost_its_name_goes_with_its_pack_after_the_grace(store):
    old = publish_files(store, "env", {"a": ONE})
    new = publish_files(store, "env", {"b": TWO})
    first = store.collect_garbage(grace_seconds=600)
    assert (first.layers, first.packs, first.waiting) == ([], [], 2)
    assert first.waiting_bytes > len(ONE)
    age(store, 500)
    assert store.collect_garbage(grace_seconds=600).layers == []
    age(store, 101)
    second = store.collect_garbage(grace_seconds=600)
    assert second.layers == [old.digest]
    assert len(second.packs) == 1
    assert second.bytes > len(ONE)
    assert left(store) == ({new.digest}, 2, 0)
    [path] = store.acquire([new.digest], "sb-1")
    assert read_files(path) == {"b": TWO}


def test_a_dry_run_tells_and_leaves_everything(store):
    publish_files(store, "env", {"a": ONE})
    old = store.show("env").digest
    publish_files(store, "env", {"b": TWO})
    told = store.collect_garbage(grace_seconds=0, dry_run=True)
    assert (told.layers, len(told.packs), told.dry_run) == ([old], 1, True)
    assert len(store.layers.layers()) == 2
    assert left(store)[2] == 0
    done = store.collect_garbage(grace_seconds=0)
    assert (done.layers, done.packs, done.bytes) == (told.layers, told.packs, told.bytes)


def test_a_pack_lives_as_long_as_one_layer_needs_a_part_of_it(store):
    publish_files(store, "first", {"a": ONE, "b": TWO})
    second = publish_files(store, "second", {"b": TWO, "c": THREE})
    assert len(second.identity.packs) == 2
    store.remove("first")
    assert store.collect_garbage(grace_seconds=0).packs == []
    [path] = store.acquire([second.digest], "sb-1")
    assert read_files(path) == {"b": TWO, "c": THREE}
    store.release("sb-1")
    store.remove("second")
    assert len(store.collect_garbage(grace_seconds=0).packs) == 2
    assert left(store) == (set(), 0, 0)


def test_what_a_snapshot_is_a_difference_to_lives_with_it(store):
    base = publish_files(store, "base", {"a": ONE})
    snapshot = publish_files(store, "snap", {"b": TWO}, kind="snapshot", below=[base.digest])
    store.remove("base")
    assert store.collect_garbage(grace_seconds=0).layers == []
    resolved = store.resolve(["snap"])
    assert resolved.digests == [base.digest, snapshot.digest]
    paths = store.acquire(resolved.digests, "sb-1")
    assert [read_files(path) for path in paths] == [{"a": ONE}, {"b": TWO}]
    store.release("sb-1")
    store.remove("snap")
    assert sorted(store.collect_garbage(grace_seconds=0).layers) == sorted([base.digest, snapshot.digest])


def test_a_layer_that_a_sandbox_of_any_node_uses_stays(store, state_run):
    digest = publish_files(store, "env", {"a": ONE}).digest
    other = EnvironmentStore(state_run.state / "other", state_run.run / "other", store.layers.root)
    [path] = other.acquire(other.resolve(["env"]).digests, "sb-1")
    store.remove("env")
    age(store, 86400)
    assert store.collect_garbage(grace_seconds=0).layers == []
    assert read_files(path) == {"a": ONE}
    other.release("sb-1")
    assert other.sweep_mounts([]) == [digest]
    assert store.collect_garbage(grace_seconds=0).layers == [digest]
    assert os.listdir(state_run.state / "other/layers") != []
    other.sweep_mounts([])
    assert os.listdir(state_run.state / "other/layers") == []


def test_a_node_that_was_not_heard_of_for_long_holds_nothing(store, state_run):
    digest = publish_files(store, "env", {"a": ONE}).digest
    other = EnvironmentStore(state_run.state / "other", state_run.run / "other", store.layers.root)
    other.acquire([digest], "sb-1")
    store.remove("env")
    age(store, 8 * 86400)
    try:
        assert store.collect_garbage(grace_seconds=0).layers == [digest]
    finally:
        other.sweep_mounts([])
    assert left(store)[0] == set()


def test_a_node_that_lives_says_so(store):
    digest = publish_files(store, "env", {"a": ONE}).digest
    store.acquire([digest], "sb-1")
    age(store, 8 * 86400)
    store.sweep_mounts(["sb-1"])
    other = EnvironmentStore(store.state / "elsewhere", store.run / "elsewhere", store.layers.root)
    other.remove("env")
    assert other.collect_garbage(grace_seconds=0).layers == []


def test_naming_a_condemned_layer_saves_it_and_its_packs(store):
    manifest = publish_files(store, "env", {"a": ONE})
    store.remove("env")
    assert store.collect_garbage(grace_seconds=600).waiting == 2
    publish_files(store, "again", {"a": ONE})
    assert left(store)[2] == 0
    age(store, 1200)
    assert store.collect_garbage(grace_seconds=600).layers == []
    assert store.resolve(["again"]).digests == [manifest.digest]


def test_a_pack_that_a_build_has_looked_at_is_young(store):
    publish_files(store, "env", {"a": ONE})
    store.remove("env")
    store.collect_garbage(grace_seconds=600)
    age(store, 1200)
    with store.layers.building.lease() as folder, KnownContents(store.state / "contents.db", store.layers.packs.folder) as known:
        known.refresh()
        packer = Packer(folder, known)
        packer.add([ONE])
        report = store.collect_garbage(grace_seconds=600)
        assert (len(report.layers), report.packs) == (1, [])
        packer.finish()


@pytest.mark.parametrize("moment", ["finish", "publish"])
def test_a_build_whose_pack_goes_is_told_and_nothing_is_visible(store, moment):
    publish_files(store, "env", {"a": ONE})
    store.remove("env")
    with store.layers.building.lease() as leased, KnownContents(store.state / "contents.db", store.layers.packs.folder) as known:
        known.refresh()
        packer = Packer(leased, known)
        size, inline, segments = packer.add([ONE])
        root = folder()
        root.children[b"a"] = Node(0o100644, size=size, inline=inline, segments=segments)
        if moment == "finish":
            store.collect_garbage(grace_seconds=0)
            with pytest.raises(ContentsLost):
                packer.finish()
        else:
            assert packer.finish() is None
            store.collect_garbage(grace_seconds=0)
            with pytest.raises(ContentsLost):
                publish_drafts(
                    store.layers,
                    [draft_tree(root, pack=None, folder=leased, kind="base", source="", reference=parse_reference("env"))],
                    pack=None,
                    folder=leased,
                )
    assert store.list() == []
    assert left(store) == (set(), 0, 0)
    assert publish_files(store, "env", {"a": ONE}).contents.stored_bytes > 0


def test_what_is_named_between_the_look_and_the_removal_stays(store, monkeypatch):
    manifest = publish_files(store, "env", {"a": ONE})
    store.remove("env")
    remove = store._garbage._remove

    def late(*arguments):
        assert publish_files(store, "again", {"a": ONE}).digest == manifest.digest
        remove(*arguments)

    monkeypatch.setattr(store._garbage, "_remove", late)
    report = store.collect_garbage(grace_seconds=0)
    assert (report.layers, report.packs) == ([], [])
    [path] = store.acquire(store.resolve(["again"]).digests, "sb-1")
    assert read_files(path) == {"a": ONE}
    assert left(store)[2] == 0


def test_what_is_acquired_between_the_look_and_the_removal_stays(store, state_run, monkeypatch):
    digest = publish_files(store, "env", {"a": ONE}).digest
    store.remove("env")
    other = EnvironmentStore(state_run.state / "other", state_run.run / "other", store.layers.root)
    remove = store._garbage._remove

    def late(*arguments):
        other.acquire([digest], "sb-1")
        remove(*arguments)

    monkeypatch.setattr(store._garbage, "_remove", late)
    try:
        assert store.collect_garbage(grace_seconds=0).layers == []
        assert store.layers.damage(digest) is None
    finally:
        other.sweep_mounts([])


def test_an_import_lives_as_long_as_an_image_uses_its_packs(store):
    imported = publish_files(store, "", {"a": ONE}, kind="toolkit", imported="ab" * 32)
    publish_files(store, "image", {"a": ONE, "b": TWO})
    assert store.collect_garbage(grace_seconds=0).layers == []
    assert import_of(store.layers, "ab" * 32) == imported.digest
    store.remove("image")
    assert store.collect_garbage(grace_seconds=5).waiting == 2
    age(store, 10)
    report = store.collect_garbage(grace_seconds=5)
    assert (len(report.layers), report.imports, len(report.packs)) == (1, 0, 1)
    assert report.waiting == 3
    age(store, 10)
    report = store.collect_garbage(grace_seconds=5)
    assert (report.layers, report.imports, len(report.packs)) == ([imported.digest], 1, 1)
    assert import_of(store.layers, "ab" * 32) is None
    assert os.listdir(store.layers.root / "imports") == []


def test_a_trace_goes_with_its_layer(store):
    digest = publish_files(store, "env", {"a": ONE}).digest
    trace = store.layers.root / "traces" / f"{digest[7:]}.json"
    trace.write_text("[]")
    assert store.collect_garbage(grace_seconds=0).traces == 0
    store.remove("env")
    assert store.collect_garbage(grace_seconds=0).traces == 1
    assert not trace.exists()


@pytest.mark.parametrize("half", [".data", ".index"])
def test_half_a_pack_that_a_crash_left_goes(store, half):
    publish_files(store, "env", {"a": ONE})
    store.layers.packs.folder.joinpath("f" * 64 + half).write_bytes(b"x")
    assert store.collect_garbage(grace_seconds=600).packs == []
    age(store, 1200)
    assert store.collect_garbage(grace_seconds=600).packs == ["sha256:" + "f" * 64]
    assert left(store)[1:] == (2, 0)


@pytest.mark.parametrize("damaged", ["manifest", "tag"])
def test_while_something_in_use_is_unreadable_nothing_is_removed(store, damaged):
    old = publish_files(store, "env", {"a": ONE}).digest
    new = publish_files(store, "env", {"b": TWO}).digest
    path = store.layers.folder(new) / "manifest.json" if damaged == "manifest" else store.layers.root / "tags/env/latest"
    text = path.read_text()
    path.write_text("garbage")
    report = EnvironmentStore(store.state, store.run).collect_garbage(grace_seconds=0)
    assert (report.layers, report.packs, len(report.unreadable)) == ([], [], 1)
    path.write_text(text)
    assert store.collect_garbage(grace_seconds=0).layers == [old]


def test_a_store_that_is_not_whole_is_an_error_and_not_taken_for_empty(store):
    publish_files(store, "env", {"a": ONE})
    (store.layers.root / "tags").rename(store.layers.root / "away")
    (store.layers.root / "tags").touch()
    with pytest.raises(SandboxFailed) as caught:
        store._garbage.collect(grace_seconds=0)
    assert caught.value.cause == "store-lost"
    assert len(store.layers.layers()) == 1


def test_two_collections_at_once_are_one(store):
    publish_files(store, "env", {"a": ONE})
    with (store.layers.root / "garbage.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert store.collect_garbage(grace_seconds=0).skipped
    assert not store.collect_garbage(grace_seconds=0, not_within_seconds=600).skipped
    assert store.collect_garbage(grace_seconds=0, not_within_seconds=600).skipped
    assert not store.collect_garbage(grace_seconds=0).skipped


def test_what_is_unused_is_told_by_references_alone():
    layers = {
        "base": LayerReferences(frozenset({"p1"}), ()),
        "snap": LayerReferences(frozenset({"p2"}), ("base",)),
        "lone": LayerReferences(frozenset({"p1", "p3"}), ()),
        "part": LayerReferences(frozenset({"p1"}), ()),
    }
    inventory = Inventory(
        layers, {"p1", "p2", "p3", "p4"}, {"snap", "gone"}, imports={"t1": "part", "t2": "lone", "t3": "gone"}, traces={"base", "lone"}
    )
    unused, unreadable = find_unused(inventory)
    assert unused == {("layer", "lone"), ("pack", "p3"), ("pack", "p4"), ("import", "t2"), ("import", "t3"), ("trace", "lone")}
    assert unreadable == []
    layers["snap"] = None
    unused, unreadable = find_unused(inventory)
    assert unreadable == ["snap"]
    assert {kind for kind, _ in unused} <= {"import", "trace"}
