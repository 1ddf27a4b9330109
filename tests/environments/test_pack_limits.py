"""A tree scattered over many packs is brought together, with the same bytes."""

from __future__ import annotations

import stat

import pytest
from layering import noise

from dsec.environments.packs import ContentsLost, KnownContents, Packer, data_name, index_name
from dsec.environments.packs.limit import limit_packs
from dsec.environments.trees.model import BLOCK, Node, folder


@pytest.fixture
def packs(tmp_path):
    made = tmp_path / "packs"
    made.mkdir()
    return made


def scattered(tmp_path, packs, sizes):
    """A tree whose every file lies in a pack of its own."""
    root = folder()
    for number, size in enumerate(sizes):
        place = tmp_path / f"new-{number}"
        place.mkdir()
        packer = Packer(place)
        count, inline, segments = packer.add([noise(number, size)])
        pack = packer.finish()
        for name in (data_name(pack.digest), index_name(pack.digest)):
            (place / name).rename(packs / name)
        root.children[b"%d" % number] = Node(stat.S_IFREG | 0o644, size=count, inline=inline, segments=segments)
    return root


def content(node, *folders):
    data = bytearray(-(-node.size // BLOCK) * BLOCK)
    for segment in node.segments:
        [path] = [each / data_name(segment.pack.digest) for each in folders if (each / data_name(segment.pack.digest)).exists()]
        with path.open("rb") as file:
            file.seek(segment.start * BLOCK)
            data[segment.at * BLOCK : (segment.at + segment.count) * BLOCK] = file.read(segment.count * BLOCK)
    return bytes(data[: node.size])


def test_the_least_useful_packs_are_stored_anew(tmp_path, packs):
    sizes = [BLOCK * (number + 1) for number in range(10)]
    root = scattered(tmp_path, packs, sizes)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    packer = Packer(fresh)
    assert limit_packs(root, packer, packs, limit=4, little=0) == sum(sizes[:7])
    pack = packer.finish()
    used = {segment.pack.digest for node in root.children.values() for segment in node.segments}
    assert len(used) == 4
    assert pack.digest in used
    for number, size in enumerate(sizes):
        assert content(root.children[b"%d" % number], packs, fresh) == noise(number, size)


def test_packs_for_a_little_go_in_any_case_and_known_contents_do_not_bring_them_back(tmp_path, packs):
    root = scattered(tmp_path, packs, [1000, 200_000, 3000])
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with KnownContents(tmp_path / "contents.db", packs) as known:
        known.refresh()
        packer = Packer(fresh, known)
        assert limit_packs(root, packer, packs) == 4000
        packer.finish()
    assert len({segment.pack.digest for node in root.children.values() for segment in node.segments}) == 2
    assert [content(root.children[b"%d" % number], packs, fresh) for number in range(3)] == [
        noise(0, 1000),
        noise(1, 200_000),
        noise(2, 3000),
    ]


def test_holes_and_two_names_of_a_file_stay(tmp_path, packs):
    place = tmp_path / "place"
    place.mkdir()
    packer = Packer(place)
    parts = [noise(1, 1 << 20), 4 << 20, noise(2, 1 << 20)]
    size, inline, segments = packer.add(parts)
    pack = packer.finish()
    for name in (data_name(pack.digest), index_name(pack.digest)):
        (place / name).rename(packs / name)
    node = Node(stat.S_IFREG | 0o644, size=size, inline=inline, segments=segments)
    root = folder()
    root.children |= {b"one": node, b"two": node}
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    packer = Packer(fresh)
    assert limit_packs(root, packer, packs, limit=1) == 2 << 20
    packer.finish()
    assert root.children[b"one"] is root.children[b"two"]
    assert [(segment.at, segment.count) for segment in node.segments] == [(segment.at, segment.count) for segment in segments]
    assert content(node, fresh) == b"".join(bytes(part) if isinstance(part, int) else part for part in parts)


def test_segments_are_stored_as_they_are(tmp_path):
    """Zeros too: what refers to a segment counts on its length."""
    packer = Packer(tmp_path)
    first = packer.store([bytes(100_000)])
    second = packer.store([noise(1, 100), noise(2, 5000)])
    assert packer.store([bytes(50_000), bytes(50_000)]) == first
    pack = packer.finish()
    data = (tmp_path / data_name(pack.digest)).read_bytes()
    assert data[first[1] * BLOCK :][:100_000] == bytes(100_000)
    assert data[second[1] * BLOCK :][:5100] == noise(1, 100) + noise(2, 5000)


@pytest.mark.parametrize("lost", ["gone", "cut"])
def test_a_pack_that_cannot_be_read_makes_the_build_run_again(tmp_path, packs, lost):
    root = scattered(tmp_path, packs, [1000])
    [path] = packs.glob("*.data")
    if lost == "gone":
        path.unlink()
    else:
        path.write_bytes(b"")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with pytest.raises(ContentsLost):
        limit_packs(root, Packer(fresh), packs)
