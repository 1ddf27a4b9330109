"""What `dsec store df` says: each byte belongs to one layer, to several, or to nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layering import noise, publish_files

from dsec.environments import EnvironmentStore
from dsec.environments.extents import blocks_of, decode_extents, encode_extents, joined
from dsec.environments.report import LayerReport, _share
from libdsec.errors import SandboxFailed

pytestmark = pytest.mark.root

BLOCK = 4096
ONE, TWO, THREE = noise(1, BLOCK), noise(2, 2 * BLOCK), noise(3, 4 * BLOCK)


def test_what_layers_share_and_what_is_dead_is_told(store):
    first = publish_files(store, "first", {"a": ONE, "b": TWO, "c": THREE})
    second = publish_files(store, "second", {"b": TWO})
    third = publish_files(store, "third", {"c": THREE, "again": THREE, "small": b"x"})
    report = store.report()
    by = {layer.digest: layer for layer in report.layers}
    assert (by[first.digest].own_bytes, by[first.digest].shared_bytes) == (BLOCK, 6 * BLOCK)
    assert (by[second.digest].own_bytes, by[second.digest].shared_bytes) == (0, 2 * BLOCK)
    assert (by[third.digest].own_bytes, by[third.digest].shared_bytes) == (0, 4 * BLOCK)
    assert by[third.digest].logical_bytes == 8 * BLOCK + 1
    assert by[third.digest].files == 3
    [pack] = report.packs
    assert (pack.bytes, pack.referenced_bytes, pack.dead_bytes, pack.layers) == (7 * BLOCK, 7 * BLOCK, 0, 3)
    assert report.ratio == round(13 / 7, 3)
    store.remove("first")
    store.collect_garbage(grace_seconds=0)
    report = store.report()
    [pack] = report.packs
    assert (pack.bytes, pack.referenced_bytes, pack.dead_bytes) == (7 * BLOCK, 6 * BLOCK, BLOCK)
    assert (report.dead_bytes, report.data_bytes) == (BLOCK, 6 * BLOCK)
    assert all(layer.shared_bytes == 0 for layer in report.layers)


def test_who_uses_a_layer_is_told(store):
    base = publish_files(store, "base", {"a": ONE})
    snapshot = publish_files(store, "snap:v1", {"b": TWO}, kind="snapshot", below=[base.digest])
    imported = publish_files(store, "", {"c": THREE}, kind="toolkit", imported="ab" * 32)
    lone = publish_files(store, "", {"d": THREE}, kind="toolkit")
    store.acquire([base.digest], "sb-1")
    by = {layer.digest: layer for layer in store.report().layers}
    assert (by[base.digest].tags, by[base.digest].above, len(by[base.digest].nodes)) == (["base:latest"], [snapshot.digest], 1)
    assert (by[snapshot.digest].tags, by[snapshot.digest].nodes) == (["snap:v1"], [])
    assert (by[imported.digest].imported, by[imported.digest].used) == (True, False)
    assert (by[lone.digest].imported, by[lone.digest].used) == (False, False)


def test_a_damaged_layer_is_told_among_the_others(store):
    publish_files(store, "good", {"a": ONE})
    bad = publish_files(store, "bad", {"b": TWO})
    (store.layers.folder(bad.digest) / "manifest.json").write_bytes(b"{")
    report = EnvironmentStore(store.state, store.run).report()
    assert [(layer.name, layer.damage != "") for layer in report.layers] == [("", True), ("good", False)]


def test_a_store_that_is_not_there_is_a_typed_error(tmp_path):
    with pytest.raises(SandboxFailed) as caught:
        EnvironmentStore(tmp_path / "state", tmp_path / "run", tmp_path / "away").report()
    assert caught.value.cause == "store-lost"


extents = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=8).map(joined)


@given(st.lists(extents, max_size=5))
def test_shares_of_a_pack_are_those_of_counting_block_by_block(layers):
    reports = {str(number): LayerReport(digest=str(number)) for number in range(len(layers))}
    pack = _share("p", 60 * BLOCK, [(str(number), each) for number, each in enumerate(layers)], reports)
    sets = [{block for start, count in each for block in range(start, start + count)} for each in layers]
    for number, blocks in enumerate(sets):
        others = set().union(*(other for index, other in enumerate(sets) if index != number))
        assert reports[str(number)].own_bytes == len(blocks - others) * BLOCK
        assert reports[str(number)].shared_bytes == len(blocks & others) * BLOCK
    assert pack.referenced_bytes == len(set().union(*sets)) * BLOCK
    assert pack.dead_bytes == 60 * BLOCK - pack.referenced_bytes


@given(st.lists(extents, max_size=5))
def test_extents_survive_being_written(layers):
    data = encode_extents(layers)
    assert decode_extents(data, len(layers)) == layers
    assert sum(map(blocks_of, layers)) <= 50 * len(layers)
    for cut in range(len(data)):
        with pytest.raises(ValueError, match="extents"):
            decode_extents(data[:cut], len(layers))


def dsec(store, *arguments, code=0):
    environment = {**os.environ, "DSEC_STATE": str(store.state), "DSEC_RUN": str(store.run)}
    done = subprocess.run([sys.executable, "-m", "dsec.cli", *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_command_line_tells_collects_and_verifies(store):
    old = publish_files(store, "env", {"a": ONE}).digest
    new = publish_files(store, "env", {"b": TWO}).digest
    table = dsec(store, "store", "df", "--packs")
    assert new[:19] in table
    assert "env:latest" in table
    assert "nobody" in table
    assert len(json.loads(dsec(store, "store", "df", "--json"))["layers"]) == 2
    assert json.loads(dsec(store, "store", "gc", "--grace", "0", "--dry-run", "--json"))["layers"] == [old]
    assert "1 layers and 1 packs removed" in dsec(store, "store", "gc", "--grace", "0")
    assert json.loads(dsec(store, "store", "verify", "--json"))["damages"] == []
    [pack] = store.layers.packs.folder.glob("*.data")
    with pack.open("r+b") as file:
        file.write(b"?")
    said = dsec(store, "store", "verify", code=1)
    assert "segment 0 at 0" in said
    assert "meant by env:latest" in said
