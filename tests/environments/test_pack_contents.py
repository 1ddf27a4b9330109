"""What a sandbox did to its files to make packing fail, or its pack grow."""

from __future__ import annotations

import os

import pytest

from dsec.environments.names import parse_reference
from dsec.environments.packing import PackPlan, StackLimits, pack_snapshot
from libdsec.errors import QuotaExceeded, Unsupported

pytestmark = [pytest.mark.root, pytest.mark.slow]

MIB = 1 << 20


@pytest.fixture
def upper(scratch):
    """An upper folder on btrfs, with a file."""
    if not scratch.capabilities.disk_limit:
        pytest.skip("needs btrfs")
    folder = scratch.create("sb", None) / "upper"
    (folder / "a").mkdir()
    (folder / "a/file").write_bytes(b"x" * 10_000)
    return folder


def pack(store, upper):
    plan = PackPlan(reference=parse_reference("packed"), kind="workspace", source="test", layers=[])
    return pack_snapshot(store.state, store.layers, upper, [], plan, StackLimits()).manifest


def test_what_is_about_the_file_system_it_lies_on_is_left_out(store, upper):
    os.setxattr(upper / "a", "btrfs.compression", b"zstd")
    os.setxattr(upper / "a/file", "user.kept", b"1")
    pack(store, upper)
    [path] = store.acquire([store.show("packed").digest], "sb-1")
    assert os.listxattr(f"{path}/a/file") == ["user.kept"]
    assert os.listxattr(f"{path}/a") == []


@pytest.mark.parametrize("values", [True, False])
def test_attributes_that_no_layer_can_hold_are_told_with_their_file(store, upper, values):
    if values:
        for number in range(40):
            os.setxattr(upper / "a/file", f"user.{number}", b"v" * 15_000)
    else:
        for number in range(400):
            os.setxattr(upper / "a/file", f"user.{number:0200}", b"v")
    with pytest.raises(Unsupported, match="a/file") as caught:
        pack(store, upper)
    assert caught.value.cause == "tree"
    assert store.list() == []


def scattered(path, number, size):
    """Pages as far from each other as can be."""
    with path.open("wb") as file:
        for index in range(number):
            file.seek(index * size // number)
            file.write(b"%d" % index * 100)
        file.truncate(size)


def test_a_sparse_file_is_packed(store, upper):
    scattered(upper / "sparse", 4, 8 << 40)
    assert pack(store, upper).contents.stored_bytes <= 300 * MIB


def test_a_pack_does_not_grow_beyond_what_the_files_take(store, upper):
    scattered(upper / "sparse", 40, 8 << 40)
    with pytest.raises(QuotaExceeded) as caught:
        pack(store, upper)
    assert caught.value.cause == "disk"
    assert store.layers.packs.digests() == set()
    assert os.listdir(store.layers.building.root) == []


def test_an_ordinary_database_with_holes_is_packed(store, upper):
    scattered(upper / "database", 2_000, 1 << 30)
    manifest = pack(store, upper)
    assert manifest.contents.stored_bytes <= 2_000 * (64 << 10) + 20_000
