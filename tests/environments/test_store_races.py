"""Two who change a store at once, nodes that were copied, and looks at stores that are not there."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time

import pytest
from layering import noise, publish_files
from layouts import Layout, file, tar_of

from dsec.environments import EnvironmentStore, build
from dsec.environments.holders import forget_silent
from dsec.environments.names import parse_reference
from dsec.environments.publish import import_of
from dsec.environments.tags import Tags
from libdsec.errors import Conflict, NotFound, SandboxFailed

pytestmark = pytest.mark.root


def other_node(state_run, store, name="other"):
    return EnvironmentStore(state_run.state / name, state_run.run / name, store.layers.root)


# -- nodes ---------------------------------------------------------------------------------------------------------------------------


def test_a_node_keeps_its_id_and_a_copy_of_it_gets_its_own(store, state_run, monkeypatch):
    first = other_node(state_run, store).node.holding.node
    assert other_node(state_run, store).node.holding.node == first
    shutil.copytree(state_run.state / "other", state_run.state / "copy")
    monkeypatch.setattr("socket.gethostname", lambda: "clone")
    copy = other_node(state_run, store, "copy").node.holding.node
    assert copy != first
    assert other_node(state_run, store, "copy").node.holding.node == copy


@pytest.mark.parametrize("text", ["", "garbage", "../../etc\nx y\n", "0123456789abcdef\n"])
def test_an_id_that_is_none_is_made_anew(store, state_run, text):
    folder = state_run.state / "other"
    folder.mkdir()
    (folder / "node-id").write_text(text)
    made = other_node(state_run, store).node.holding.node
    assert len(made) == 16
    assert made not in text
    assert other_node(state_run, store).node.holding.node == made


def test_two_processes_that_make_the_id_at_once_agree(store, state_run):
    found = []

    def look():
        found.append(other_node(state_run, store).node.holding.node)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def silent(store, node, seconds):
    folder = store.layers.root / "holders" / node
    then = time.time() - seconds
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def test_a_node_that_wakes_while_it_is_forgotten_is_not(store, state_run, monkeypatch):
    digest = publish_files(store, "env", {"a": noise(1, 10_000)}).digest
    node = other_node(state_run, store).node
    node.holding.hold([digest])
    silent(store, node.holding.node, 9 * 86400)
    settled = store.layers.settled

    def waking(*, exclusive):
        if exclusive:
            node.holding.keep(lambda: [digest])
        return settled(exclusive=exclusive)

    monkeypatch.setattr(store.layers, "settled", waking)
    forget_silent(store.layers, now=time.time(), silent_seconds=7 * 86400)
    monkeypatch.undo()
    assert os.listdir(store.layers.root / "holders") == [node.holding.node]
    silent(store, node.holding.node, 9 * 86400)
    forget_silent(store.layers, now=time.time(), silent_seconds=7 * 86400)
    assert os.listdir(store.layers.root / "holders") == []
    node.holding.keep(lambda: [digest])
    assert os.listdir(store.layers.root / "holders") == [node.holding.node]


def test_who_uses_what_is_on_record_already_is_heard_of(store, state_run):
    digest = publish_files(store, "env", {"a": noise(1, 10_000)}).digest
    node = other_node(state_run, store).node
    node.holding.hold([digest])
    silent(store, node.holding.node, 9 * 86400)
    node.holding.hold([digest])
    assert time.time() - (store.layers.root / "holders" / node.holding.node / "layers").stat().st_mtime < 60


# -- names ---------------------------------------------------------------------------------------------------------------------------


def test_a_tag_that_moves_while_it_is_removed_is_looked_at_again(store, monkeypatch):
    publish_files(store, "env", {"a": noise(1, 10_000)})
    newer = publish_files(store, None, {"a": noise(2, 10_000)}).digest
    store.acquire([newer], "sb-1")
    reference = parse_reference("env")
    found = Tags.all

    def moving(self):
        monkeypatch.undo()
        entries = list(found(self))
        self.put(reference, newer)
        return entries

    monkeypatch.setattr(Tags, "all", moving)
    with pytest.raises(Conflict, match="in use"):
        store.remove("env")
    assert store.layers.digest_of(reference) == newer


def test_a_tag_goes_only_as_what_is_expected(store):
    digest = publish_files(store, "env", {"a": noise(1, 10_000)}).digest
    reference = parse_reference("env")
    assert not store.layers.tags.remove(reference, expected="sha256:" + "0" * 64)
    assert store.layers.tags.remove(reference, expected=digest)
    assert not store.layers.tags.remove(reference, expected=digest)
    with pytest.raises(NotFound):
        store.remove("env")


# -- looks ---------------------------------------------------------------------------------------------------------------------------


def test_a_look_at_a_store_that_is_not_there_makes_none(tmp_path):
    node = EnvironmentStore(tmp_path / "state", tmp_path / "run", tmp_path / "store")
    with pytest.raises(SandboxFailed) as caught:
        node.report()
    assert caught.value.cause == "store-lost"
    assert not (tmp_path / "store").exists()


def test_layers_of_images_without_packs_are_collected(store):
    small = publish_files(store, None, {"a": b"tiny"}, kind="snapshot", imported="ab" * 32)
    assert small.identity.packs == []
    used = publish_files(store, None, {"a": noise(1, 10_000)}, kind="snapshot", imported="cd" * 32)
    publish_files(store, "env", {"b": noise(1, 10_000)})
    for name in ("ab" * 32, "cd" * 32):
        os.utime(store.layers.root / "imports" / name, (1, 1))
    report = store.collect_garbage(grace_seconds=0)
    assert report.layers == [small.digest]
    assert report.imports == 1
    assert used.digest in store.layers.layers()


def test_what_layers_share_adds_up(store):
    for number in range(5):
        publish_files(store, f"env{number}", {"common": noise(1, 40_960), "own": noise(2 + number, 8192)})
    report = store.report()
    assert {(layer.own_bytes, layer.shared_bytes) for layer in report.layers} == {(8192, 40_960)}
    assert sum(pack.referenced_bytes for pack in report.packs) == 40_960 + 5 * 8192


def test_who_reads_an_owners_layers_while_they_change_finds_the_old_or_the_new(store):
    digests = [publish_files(store, f"env{number}", {"a": noise(number, 10_000)}).digest for number in range(2)]
    store.acquire(digests, "sb-1")
    seen, over = set(), threading.Event()

    def look():
        while not over.is_set():
            uses = store.node.uses()
            seen.add(frozenset(digest for digest, owners in uses.items() if "sb-1" in owners))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for turn in range(300):
            store.acquire(digests[: 1 + turn % 2], "sb-1")
    finally:
        over.set()
        thread.join()
    assert seen <= {frozenset(digests), frozenset(digests[:1])}
    assert store.node.owners() == {"sb-1"}


def test_many_layers_of_an_image_wait_for_the_disk_together(store, tmp_path, monkeypatch):
    """What is said to last is asked for as seldom as can be: each time waits for the disk."""
    layers = [tar_of(file(str(number), noise(number, 3000))) for number in range(20)]
    source = Layout(tmp_path / "layout").image(layers).write()
    asked = []
    fsync = os.fsync

    def counted(fd):
        asked.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr("os.fsync", counted)
    build(store, "image", source=f"oci:{source}")
    assert len(asked) <= 4 * 21 + 12
    assert asked.count(str(store.layers.root / "layers")) == 2
    assert not any("imports" in path for path in asked)
    digests = [hashlib.sha256(layer).hexdigest() for layer in layers]
    assert len({import_of(store.layers, digest) for digest in digests} - {None}) == 20
