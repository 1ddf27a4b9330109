"""Whatever is damaged in a store is found, with whom it concerns; what can be brought back, is."""

from __future__ import annotations

import os
import shutil

import pytest
from layering import noise, publish_files, read_files

from dsec.environments import EnvironmentStore
from libdsec.errors import SandboxFailed

pytestmark = pytest.mark.root

BLOCK = 4096
FILES = {"a": noise(1, 9000), "b": noise(2, 20_000), "c": noise(3, 700)}


@pytest.fixture
def layer(store):
    return publish_files(store, "env", FILES)


def pack_of(store, manifest):
    return store.layers.packs.data(manifest.identity.packs[0].digest)


def spoil(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_a_sound_store_is_read_whole(store, layer):
    told = []
    report = store.verify(progress=lambda done, total: told.append((done, total)))
    assert report.sound
    assert report.damages == []
    assert (report.layers, report.packs, report.segments) == (1, 1, 3)
    assert told[-1] == (layer.identity.metadata.size + layer.identity.packs[0].size,) * 2
    assert report.bytes == told[-1][0]


def test_a_bad_byte_is_found_and_whose_it_is(store, layer):
    """The second layer refers to another part of the same pack: it has lost nothing."""
    other = publish_files(store, "other", {"c": FILES["c"]})
    spoil(pack_of(store, layer), 3 * BLOCK + 5000)
    [damage] = store.verify().damages
    assert (damage.what, damage.name) == ("pack", layer.identity.packs[0].digest)
    [segment] = damage.segments
    assert (segment.number, segment.offset, segment.size) == (1, 3 * BLOCK, 20_000)
    assert (damage.layers, damage.tags) == ([layer.digest], ["env:latest"])
    assert other.identity.packs == layer.identity.packs


def test_padding_that_a_guest_could_map_is_read_too(store, layer):
    spoil(pack_of(store, layer), 9001)
    [damage] = store.verify().damages
    assert [segment.number for segment in damage.segments] == [0]


@pytest.mark.slow
def test_segments_larger_than_one_read_are_read_whole(store):
    manifest = publish_files(store, "env", {"a": noise(1, 20 << 20), "b": noise(2, 5000), "c": noise(3, 9 << 20)})
    assert store.verify().sound
    spoil(pack_of(store, manifest), (19 << 20) + 77)
    spoil(pack_of(store, manifest), (25 << 20) + 1)
    [damage] = store.verify().damages
    assert [segment.number for segment in damage.segments] == [0, 2]


def lose(path):
    path.unlink()


def cut(path):
    os.truncate(path, path.stat().st_size - BLOCK)


def garble(path):
    spoil(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [lose, cut, garble])
@pytest.mark.parametrize("what", ["data", "index", "manifest.json", "metadata.erofs", "extents.bin", "tag"])
def test_every_kind_of_damage_is_found(store, layer, what, harm):
    packs = store.layers.packs
    path = {
        "data": packs.data(layer.identity.packs[0].digest),
        "index": packs.index(layer.identity.packs[0].digest),
        "tag": store.layers.root / "tags/env/latest",
    }.get(what, store.layers.folder(layer.digest) / what)
    if what in ("tag", "index", "manifest.json", "extents.bin") and harm is cut:
        os.truncate(path, 10)
    elif what == "tag" and harm is lose:
        path.write_text("")
    elif what == "tag":
        path.write_text("sha256:" + "0" * 64 + " 1\n")
    else:
        harm(path)
    damages = EnvironmentStore(store.state, store.run).verify().damages
    assert [damage.tags for damage in damages] == [["env:latest"]]


def test_a_layer_without_those_that_it_is_a_difference_to_is_told(store, layer):
    snapshot = publish_files(store, "snap", {"d": noise(4, 5000)}, kind="snapshot", below=[layer.digest])
    store.remove("env")
    shutil.rmtree(store.layers.folder(layer.digest))
    damages = store.verify().damages
    assert [(damage.what, damage.name, damage.tags) for damage in damages] == [("layer", snapshot.digest, ["snap:latest"])]


def test_metadata_come_back_from_the_node_that_has_them(store, layer):
    store.acquire([layer.digest], "sb-1")
    path = store.layers.folder(layer.digest) / "metadata.erofs"
    for harm in (garble, cut, lose):
        harm(path)
        assert not store.verify().sound
        assert store.verify(repair=True).sound
        assert store.verify().damages == []


def test_a_list_of_extents_is_made_anew(store, layer):
    path = store.layers.folder(layer.digest) / "extents.bin"
    before = path.read_bytes()
    lose(path)
    assert store.verify(repair=True).sound
    assert path.read_bytes() == before


def test_segments_come_back_from_another_pack(store, layer):
    """A second pack with the same bytes, such as two builds at once leave."""
    (store.layers.packs.index(layer.identity.packs[0].digest)).rename(store.layers.root / "hidden")
    publish_files(store, "twin", {"b": FILES["b"]})
    (store.layers.root / "hidden").rename(store.layers.packs.index(layer.identity.packs[0].digest))
    spoil(pack_of(store, layer), 3 * BLOCK + 5000)
    report = store.verify(repair=True)
    assert [(damage.repaired, damage.segments[0].repaired) for damage in report.damages] == [(True, True)]
    assert store.verify().damages == []
    [path] = store.acquire([layer.digest], "sb-1")
    assert read_files(path) == FILES


def test_what_cannot_come_back_is_stored_anew_by_the_next_build(store, layer):
    spoil(pack_of(store, layer), 5000)
    assert not store.verify(repair=True).sound
    assert store.layers.damage(layer.digest) is not None
    again = publish_files(store, "env", FILES)
    assert again.digest == layer.digest
    assert store.verify().damages == []
    [path] = store.acquire([again.digest], "sb-1")
    assert read_files(path) == FILES


def test_a_store_that_is_away_is_a_typed_error(tmp_path):
    with pytest.raises(SandboxFailed) as caught:
        EnvironmentStore(tmp_path / "state", tmp_path / "run", tmp_path / "away").verify()
    assert caught.value.cause == "store-lost"
