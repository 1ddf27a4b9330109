"""A node that may only read the store runs sandboxes from it; what would have to be written there is left out or refused."""

from __future__ import annotations

import os
import subprocess

import pytest
from layering import noise, publish_files, read_files

from dsec.environments import EnvironmentStore
from dsec.kernel.mounts import unmount
from libdsec.errors import DSecError

pytestmark = pytest.mark.root


@pytest.fixture
def reader(store, tmp_path):
    """Another node, which has the store mounted read-only."""
    publish_files(store, "env", {"a": noise(1, 10_000)})
    place = tmp_path / "readonly"
    place.mkdir()
    subprocess.run(["mount", "--bind", "-o", "ro", store.layers.root, place], check=True)
    node = EnvironmentStore(tmp_path / "state", tmp_path / "run", place)
    yield node
    node.sweep_mounts([])
    unmount(place)


def test_sandboxes_run_from_it(reader):
    digests = reader.resolve(["env"]).digests
    [path] = reader.acquire(digests, "sb-1")
    assert read_files(path) == {"a": noise(1, 10_000)}
    assert reader.sweep_mounts(["sb-1"]) == []
    assert reader.acquire(digests, "sb-2") == [path]
    reader.release("sb-1")
    reader.release("sb-2")
    assert reader.sweep_mounts([]) == digests
    assert os.listdir(reader.layers.root / "holders") == []


@pytest.mark.parametrize("marked", ["something else", "the layer"])
def test_sandboxes_run_from_it_while_something_is_to_be_collected(reader, store, marked):
    [digest] = digests = reader.resolve(["env"]).digests
    store.layers.condemned.mark("layer", digest if marked == "the layer" else "sha256:" + 64 * "0")
    [path] = reader.acquire(digests, "sb-1")
    assert read_files(path) == {"a": noise(1, 10_000)}


def test_it_is_described_and_verified(reader):
    assert [layer.tags for layer in reader.report().layers] == [["env:latest"]]
    assert reader.verify().sound
    assert [info.name for info in reader.list()] == ["env"]


CHANGES = {
    "remove": lambda node: node.remove("env"),
    "collect": lambda node: node.collect_garbage(grace_seconds=0),
    "repair": lambda node: node.verify(repair=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_it_is_a_typed_error(reader, change):
    with pytest.raises(DSecError) as caught:
        CHANGES[change](reader)
    assert caught.value.cause == "store-lost"
    assert reader.resolve(["env"]).digests
