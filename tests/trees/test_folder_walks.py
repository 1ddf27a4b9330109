"""A folder of the host as a tree, and images of such trees."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forest import Packs, image_mounted, looks, seen, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.environments.trees import OPAQUE, REDIRECT, Segment, keep_all, keep_overlay_marks, walk
from dsec.kernel import mounts
from libdsec.errors import Unsupported


class Contents:
    """Takes in files as a packer does, but keeps them whole, and counts what it was told to be zero."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.holes = 0
        self.sizes: list[int | None] = []

    def add(self, pieces: Any, size: int | None = None) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        data = bytearray()
        for piece in pieces:
            if isinstance(piece, int):
                self.holes += piece
            data += bytes(piece)
        self.sizes.append(size)
        return len(data), bytes(data), ()


@pytest.fixture
def place() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dsec-trees-"))
    yield made
    shutil.rmtree(made)


def _fill(root: Path) -> None:
    (root / "a/b").mkdir(parents=True)
    (root / "a/file").write_bytes(os.urandom(10_000))
    os.link(root / "a/file", root / "a/b/same")
    (root / "empty").touch()
    (root / "link").symlink_to("/etc/passwd")
    os.close(os.open(os.fsencode(root) + b"/a/byte\xff", os.O_CREAT | os.O_WRONLY, 0o600))
    os.mkfifo(root / "fifo", 0o640)
    os.link(root / "fifo", root / "a/fifo")


def test_what_lies_there(place: Path) -> None:
    _fill(place)
    contents = Contents()
    tree = walk(place, contents.add)
    assert looks(tree) == seen(place)
    assert contents.sizes.count(10_000) == 1, "a file with two names is read once"


def test_from_a_descriptor(place: Path) -> None:
    _fill(place)
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert looks(walk(fd, Contents().add)) == seen(place)
        assert os.fstat(fd)
    finally:
        os.close(fd)


@pytest.mark.root
def test_devices_owners_and_attributes(place: Path) -> None:
    _fill(place)
    os.mknod(place / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(place / "gone", stat.S_IFCHR, 0)
    os.chown(place / "link", 7, 70_000, follow_symlinks=False)
    os.setxattr(place / "link", "trusted.note", b"of the link", follow_symlinks=False)
    os.setxattr(place / "a", "user.note", b"\0")
    os.setxattr(place / "a/file", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    os.utime(place / "link", ns=(0, -1_000_000_007), follow_symlinks=False)
    assert looks(walk(place, Contents().add)) == seen(place)


def test_holes_are_not_read(place: Path) -> None:
    with (place / "sparse").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"middle")
    pieces: list[bytes | int] = []

    def add(source: Any, size: int | None = None) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        assert size == 1 << 40
        pieces.extend(source)
        return size, None, ()

    walk(place, add)
    data = [piece for piece in pieces if isinstance(piece, bytes)]
    assert sum(piece if isinstance(piece, int) else len(piece) for piece in pieces) == 1 << 40
    assert sum(map(len, data)) <= 1 << 20
    assert data[0].startswith(b"middle")


@pytest.mark.root
def test_marks_of_overlays_are_chosen(place: Path) -> None:
    (place / "d").mkdir()
    marks = {OPAQUE: b"y", REDIRECT: b"/x", b"trusted.overlay.origin": b"\0", b"trusted.overlay.impure": b"y", b"trusted.mine": b"1"}
    for name, value in marks.items():
        os.setxattr(place / "d", name, value)
    kept = {select: set(walk(place, Contents().add, keep_xattr=select).children[b"d"].xattrs) for select in (keep_all, keep_overlay_marks)}
    assert kept == {keep_all: {b"trusted.mine"}, keep_overlay_marks: {b"trusted.mine", OPAQUE, REDIRECT}}


def test_what_is_skipped_is_not_opened(place: Path) -> None:
    _fill(place)
    asked: list[bytes] = []

    def skip(path: bytes, status: os.stat_result) -> bool:
        asked.append(path)
        return path in (b"a/b", b"empty") or stat.S_ISLNK(status.st_mode)

    tree = walk(place, Contents().add, skip=skip)
    assert set(looks(tree)) == {b"", b"/a", b"/a/file", b"/a/byte\xff", b"/a/fifo", b"/fifo"}
    assert b"a/b/same" not in asked


@pytest.mark.root
def test_other_file_systems_are_left_out(place: Path) -> None:
    (place / "mounted").mkdir()
    mount = mounts.make_mount("tmpfs", options=[("mode", "0700")])
    mounts.attach(mount, place / "mounted")
    os.close(mount)
    try:
        (place / "mounted/file").touch()
        assert set(looks(walk(place, Contents().add))) == {b"", b"/mounted"}
        assert set(looks(walk(place, Contents().add, one_file_system=False))) == {b"", b"/mounted", b"/mounted/file"}
    finally:
        mounts.unmount(place / "mounted")


def test_a_folder_replaced_by_a_link_is_not_followed(place: Path) -> None:
    """Between the listing of the folder above and its own turn."""
    (place / "a").mkdir()
    (place / "z").mkdir()
    (place / "a/file").write_bytes(b"first")

    def add(pieces: Any, size: int | None = None) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        (place / "z").rmdir()
        (place / "z").symlink_to("/etc")
        return len(b"".join(pieces)), b"", ()

    with pytest.raises(OSError, match=r"z'") as raised:
        walk(place, add)
    assert raised.value.filename == "z"


def test_a_file_that_shrinks_while_it_is_read_is_an_error(place: Path) -> None:
    (place / "file").write_bytes(bytes(range(256)) * (16 << 10))

    def add(pieces: Any, size: int | None = None) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        for _ in pieces:
            os.truncate(place / "d/file", 1 << 20)
        return 0, b"", ()

    (place / "d").mkdir()
    (place / "file").rename(place / "d/file")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="shorter") as raised:
        walk(place, add)
    assert raised.value.filename == "d/file"
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.slow
def test_depth_and_breadth(place: Path) -> None:
    deep = os.open(place, os.O_RDONLY)
    for _ in range(500):
        os.mkdir("d" * 100, dir_fd=deep)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    (place / "wide").mkdir()
    for number in range(5000):
        (place / f"wide/{number}").touch()
    tree = walk(place, Contents().add)
    assert len(tree.children[b"wide"].children) == 5000
    depth = 0
    while b"d" * 100 in tree.children:
        tree = tree.children[b"d" * 100]
        depth += 1
    assert depth == 500


@pytest.mark.root
@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mounted_image_walks_back_to_its_tree(data: st.DataObject, packs: Packs) -> None:
    tree = data.draw(trees(packs))
    with tempfile.TemporaryDirectory(prefix="dsec-trees-") as temporary, image_mounted(tree, packs, Path(temporary) / "image") as mounted:
        assert looks(walk(mounted, Contents().add)) == looks(tree, packs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "levels"), [("d", 21_000), ("d" * 255, 1_500)], ids=["deep", "long"])
def test_what_is_too_deep_is_refused_and_costs_little(place: Path, name: str, levels: int) -> None:
    deep = os.open(place, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=deep)
        below = os.open(name, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    most, limits = 0, resource.getrlimit(resource.RLIMIT_NOFILE)
    tracemalloc.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, limits[1]))
    try:
        with pytest.raises(Unsupported) as refused:
            walk(place, Contents().add, skip=lambda path, status: False)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        tracemalloc.stop()
        subprocess.run(["rm", "-rf", place / name], check=True)
    assert (refused.value.cause, len(refused.value.message) < 1000) == ("too-deep", True)
    assert most < 16 << 20


def test_a_folder_that_is_moved_away_while_it_is_read_is_noticed(place: Path) -> None:
    (place / "a/b").mkdir(parents=True)
    (place / "a/z").mkdir()
    (place / "a/b/file").write_bytes(b"x")

    def add(pieces: Any, size: int | None = None) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        (place / "a/b").rename(place / "moved")
        return 1, b"x", ()

    with pytest.raises(OSError, match="moved while it was read"):
        walk(place, add)
