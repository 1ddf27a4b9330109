"""What goes into a packer comes out of its pack, once each; the cache of known contents may be lost, stale or wrong."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.environments.packs import INLINE_LIMIT, ContentsLost, KnownContents, Packer, data_name, index_name, read_index
from dsec.environments.packs.packer import granularity
from dsec.environments.trees.model import BLOCK
from dsec.kernel.mounts import attach, make_mount, unmount
from libdsec.errors import QuotaExceeded

MIB = 1 << 20


def content(folders, added):
    """The file's bytes as its segments say, from whichever of the folders has the pack."""
    size, inline, segments = added
    if inline is not None:
        return inline
    data = bytearray(-(-size // BLOCK) * BLOCK)
    for segment in segments:
        [path] = [folder / data_name(segment.pack.digest) for folder in folders if (folder / data_name(segment.pack.digest)).exists()]
        with path.open("rb") as file:
            file.seek(segment.start * BLOCK)
            data[segment.at * BLOCK : (segment.at + segment.count) * BLOCK] = file.read(segment.count * BLOCK)
    assert not any(data[size:])
    return bytes(data[:size])


def noise(seed, size):
    return random.Random(seed).randbytes(size)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "new"
    made.mkdir()
    return made


@pytest.fixture
def published(tmp_path):
    made = tmp_path / "packs"
    made.mkdir()
    return made


def pack_of(folder, published, known, *files):
    """Store the files in a pack of their own and publish it."""
    folder.mkdir(exist_ok=True)
    packer = Packer(folder, known)
    added = [packer.add([file]) for file in files]
    pack = packer.finish()
    if pack is not None:
        for name in (data_name(pack.digest), index_name(pack.digest)):
            (folder / name).rename(published / name)
    return pack, added


def test_a_small_file_lies_in_the_metadata_and_a_larger_one_in_the_pack(folder):
    packer = Packer(folder)
    small, large = noise(1, INLINE_LIMIT), noise(2, INLINE_LIMIT + 1)
    assert packer.add([small]) == (len(small), small, ())
    assert packer.add([]) == (0, b"", ())
    size, inline, [segment] = packer.add([large[:5], large[5:]])
    assert (size, inline, segment.at, segment.count, segment.start) == (len(large), None, 0, 1, 0)
    pack = packer.finish()
    assert pack is segment.pack
    assert content([folder], (size, inline, (segment,))) == large
    assert sorted(os.listdir(folder)) == sorted([data_name(pack.digest), index_name(pack.digest)])


def test_nothing_new_makes_no_pack(folder):
    packer = Packer(folder)
    packer.add([b"small"])
    packer.add([bytes(100_000)])
    packer.add([bytes(10 * MIB)])
    assert packer.finish() is None
    assert os.listdir(folder) == []


def test_the_index_says_what_lies_where(folder):
    files = [noise(number, 1000 * number + 600) for number in range(20)]
    packer = Packer(folder)
    for file in files:
        packer.add([file])
    pack = packer.finish()
    index = read_index(folder, pack.digest)
    assert index.size == pack.size == (folder / data_name(pack.digest)).stat().st_size
    data = (folder / data_name(pack.digest)).read_bytes()
    assert len(index) == len(files)
    for entry, file in zip(index, files, strict=True):
        assert data[entry.start * BLOCK :][: entry.size] == file
        assert entry.digest == hashlib.sha256(file).digest()
    assert pack.digest == "sha256:" + hashlib.sha256((folder / index_name(pack.digest)).read_bytes()).hexdigest()


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data[:10], lambda data: data[:50] + b"?" + data[51:]])
def test_an_index_that_was_changed_is_not_believed(folder, spoil):
    packer = Packer(folder)
    packer.add([noise(1, 5000)])
    pack = packer.finish()
    path = folder / index_name(pack.digest)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=pack.digest):
        read_index(folder, pack.digest)


def test_equal_files_are_stored_once_however_they_come(folder):
    data = noise(1, 9 * MIB)
    packer = Packer(folder)
    _, _, first = packer.add([data])
    _, _, second = packer.add(data[at : at + 70_001] for at in range(0, len(data), 70_001))
    _, _, third = packer.add([data[:100_000]])
    _, _, fourth = packer.add([memoryview(data)[:100_000]])
    assert first == second
    assert third == fourth
    pack = packer.finish()
    assert pack.size == 9 * MIB + -(-100_000 // BLOCK) * BLOCK
    assert content([folder], (len(data), None, first)) == data


def test_what_follows_a_large_file_that_was_known_takes_its_place(folder):
    large, after = noise(1, 9 * MIB), noise(2, 700)
    packer = Packer(folder)
    packer.add([large])
    packer.add([large])
    added = packer.add([after])
    last = packer.add([noise(3, 5 * MIB)])
    pack = packer.finish()
    assert pack.size == 14 * MIB + BLOCK
    assert content([folder], added) == after
    assert content([folder], last) == noise(3, 5 * MIB)


def test_long_zeros_become_holes_wherever_they_lie(folder):
    data = noise(1, 3 * MIB) + bytes(2 * MIB) + noise(2, MIB) + bytes(4 * MIB + 17)
    packer = Packer(folder)
    added = packer.add([data])
    told = packer.add([data[: 3 * MIB], 2 * MIB, data[5 * MIB : 6 * MIB], 4 * MIB + 17])
    assert [(segment.at, segment.count) for segment in added[2]] == [(0, 3 * MIB // BLOCK), (5 * MIB // BLOCK, MIB // BLOCK)]
    assert told == added
    assert packer.finish().size == 4 * MIB
    assert content([folder], added) == data


@pytest.mark.slow
def test_a_terabyte_of_nothing_takes_no_time_and_a_short_list(folder):
    packer = Packer(folder)
    size = 1 << 40
    count, _, segments = packer.add([b"x", size - 2, b"y"], size=size)
    assert count == size
    assert all(segment.at * BLOCK % granularity(size) == 0 for segment in segments)
    assert len(segments) == 2
    assert packer.finish().size <= 2 * granularity(size)
    assert size // granularity(size) * 8 <= 1 << 20


def test_a_pack_grows_no_larger_than_it_may(folder):
    """A few bytes far from each other take a whole grain each, whatever the files claim to hold."""
    packer = Packer(folder, limit=60 * MIB)
    scattered = [piece for number in range(10) for piece in (bytes([number + 1]), (1 << 34) - 1)]
    packer.add(scattered[:12], size=10 << 34)
    with pytest.raises(QuotaExceeded) as caught:
        packer.add(scattered, size=10 << 36)
    assert caught.value.cause == "disk"
    packer.close()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 60 * MIB


def test_what_is_known_counts_not(folder):
    packer = Packer(folder, limit=20 * MIB)
    for _ in range(5):
        packer.add([noise(1, 8 * MIB)])
    assert packer.finish().size == 8 * MIB


@pytest.mark.parametrize("size", [16 * MIB, 1 << 30, 8 << 30])
def test_holes_of_ordinary_files_are_fine(folder, size):
    packer = Packer(folder)
    step = size // 16
    packer.add([piece for _ in range(16) for piece in (noise(_, 100), step - 100)], size=size)
    assert packer.finish().size == 16 * (64 << 10)


file_parts = st.lists(
    st.one_of(
        st.tuples(st.just("noise"), st.integers(0, 3), st.sampled_from([1, 511, 4096, 65_536, 200_000, MIB, 3 * MIB + 5])),
        st.tuples(st.just("zeros"), st.just(0), st.sampled_from([1, 4096, 65_536, 131_072, MIB, 2 * MIB, 5 * MIB])),
        st.tuples(st.just("hole"), st.just(0), st.sampled_from([1, 4096, 65_536, 131_072, MIB, 2 * MIB, 5 * MIB])),
    ),
    max_size=6,
)


def plain(parts):
    return b"".join(noise(seed, size) if kind == "noise" else bytes(size) for kind, seed, size in parts)


@pytest.mark.slow
@given(files=st.lists(file_parts, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_goes_in_comes_out(tmp_path_factory, files):
    top = tmp_path_factory.mktemp("packs")
    published = top / "packs"
    published.mkdir()
    with KnownContents(top / "contents.db", published) as known:
        for attempt in range(2):
            folder = top / f"new-{attempt}"
            folder.mkdir()
            packer = Packer(folder, known)
            added = [
                packer.add(
                    [size if kind == "hole" else noise(seed, size) if kind == "noise" else bytes(size) for kind, seed, size in parts]
                )
                for parts in files
            ]
            pack = packer.finish()
            for parts, one in zip(files, added, strict=True):
                assert content([folder, published], one) == b"".join(
                    noise(seed, size) if kind == "noise" else bytes(size) for kind, seed, size in parts
                )
            if attempt == 0 and pack is not None:
                for name in (data_name(pack.digest), index_name(pack.digest)):
                    (folder / name).rename(published / name)
                known.refresh()
            if attempt == 1:
                assert pack is None


def test_what_another_pack_holds_is_referred_to(tmp_path, published):
    shared, mine, large = noise(1, 10_000), noise(2, 10_000), noise(3, 6 * MIB)
    with KnownContents(tmp_path / "contents.db", published) as known:
        first, _ = pack_of(tmp_path / "one", published, known, shared, large)
        known.refresh()
        second, added = pack_of(tmp_path / "two", published, known, mine, shared, large)
        assert second.size == 12_288
        assert {segment.pack.digest for _, _, segments in added for segment in segments} == {first.digest, second.digest}
        assert [content([published], one) for one in added] == [mine, shared, large]


def test_a_pack_that_is_in_use_is_preferred(tmp_path, published):
    both, only = noise(1, 10_000), noise(2, 10_000)
    with KnownContents(tmp_path / "contents.db", published) as known:
        pack_of(tmp_path / "one", published, None, both)
        second, _ = pack_of(tmp_path / "two", published, None, only, both)
        known.refresh()
        _, added = pack_of(tmp_path / "three", published, known, only, both)
        assert {segment.pack.digest for _, _, segments in added for segment in segments} == {second.digest}


def test_no_more_packs_are_referred_to_than_a_mount_takes(tmp_path, published):
    files = [noise(number, 1000) for number in range(80)]
    for number, file in enumerate(files):
        pack_of(tmp_path / f"{number}", published, None, file)
    with KnownContents(tmp_path / "contents.db", published) as known:
        known.refresh()
        _, added = pack_of(tmp_path / "all", published, known, *files)
        assert len({segment.pack.digest for _, _, segments in added for segment in segments}) == 64
        assert [content([published], one) for one in added] == files


@pytest.mark.root
@pytest.mark.slow
def test_a_disk_that_is_full_is_told_and_leaves_no_thread(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    mount = make_mount("tmpfs", options=[("size", "8m")])
    attach(mount, full)
    os.close(mount)
    try:
        packer = Packer(full)
        with pytest.raises(OSError, match="No space left"):
            packer.add(noise(number, MIB) for number in range(40))
        packer.close()
        assert not any(thread.name == "dsec-pack" for thread in threading.enumerate())
    finally:
        unmount(full)


def test_a_pack_that_is_gone_is_known_no_more(tmp_path, published):
    data = noise(1, 10_000)
    with KnownContents(tmp_path / "contents.db", published) as known:
        pack, _ = pack_of(tmp_path / "one", published, None, data)
        known.refresh()
        assert [(found.digest, start) for found, start in known.find(hashlib.sha256(data).digest())] == [(pack.digest, 0)]
        (published / index_name(pack.digest)).unlink()
        (published / data_name(pack.digest)).unlink()
        known.refresh()
        assert known.find(hashlib.sha256(data).digest()) == []


def test_a_pack_that_goes_while_it_is_referred_to_is_noticed(tmp_path, published, folder):
    data = noise(1, 10_000)
    with KnownContents(tmp_path / "contents.db", published) as known:
        pack, _ = pack_of(tmp_path / "one", published, None, data)
        known.refresh()
        packer = Packer(folder, known)
        packer.add([data])
        (published / index_name(pack.digest)).unlink()
        with pytest.raises(ContentsLost, match=pack.digest):
            packer.finish()


def test_referring_to_a_pack_makes_it_young(tmp_path, published, folder):
    data = noise(1, 10_000)
    with KnownContents(tmp_path / "contents.db", published) as known:
        pack, _ = pack_of(tmp_path / "one", published, None, data)
        os.utime(published / index_name(pack.digest), (1, 1))
        known.refresh()
        packer = Packer(folder, known)
        packer.add([data])
        assert (published / index_name(pack.digest)).stat().st_mtime > 1
        packer.finish()


@pytest.mark.parametrize("garbage", [b"", b"garbage" * 1000, None])
def test_a_cache_that_is_lost_or_damaged_is_made_anew(tmp_path, published, garbage):
    data, path = noise(1, 10_000), tmp_path / "contents.db"
    pack_of(tmp_path / "one", published, None, data)
    with KnownContents(path, published) as known:
        known.refresh()
    if garbage is None:
        path.unlink()
    else:
        path.write_bytes(garbage)
    with KnownContents(path, published) as known:
        assert known.find(hashlib.sha256(data).digest()) == []
        known.refresh()
        assert len(known.find(hashlib.sha256(data).digest())) == 1


def test_a_cache_that_lies_is_found_out(tmp_path, published, folder):
    data, other, path = noise(1, 10_000), noise(2, 10_000), tmp_path / "contents.db"
    pack_of(tmp_path / "one", published, None, data, other)
    with KnownContents(path, published) as known:
        known.refresh()
        known._opened().execute("UPDATE segments SET start = 3 - start")
        packer = Packer(folder, known)
        packer.add([data])
        with pytest.raises(ContentsLost, match="wrong"):
            packer.finish()
        known.refresh()
        _, added = pack_of(tmp_path / "two", published, known, data)
        assert content([published], added[0]) == data


REFRESH = """
import sys
from pathlib import Path
from dsec.environments.packs import KnownContents
with KnownContents(Path(sys.argv[1]), Path(sys.argv[2])) as known:
    sys.stdin.read(1)
    known.refresh()
    print(len(known.find(bytes.fromhex(sys.argv[3]))))
"""


@pytest.mark.slow
def test_several_processes_share_a_cache(tmp_path, published):
    data = noise(0, 1000)
    for number in range(20):
        pack_of(tmp_path / f"{number}", published, None, noise(number, 1000))
    arguments = [sys.executable, "-c", REFRESH, str(tmp_path / "contents.db"), str(published), hashlib.sha256(data).hexdigest()]
    processes = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate("x", timeout=60)[0] for process in processes] == ["1\n"] * 3
