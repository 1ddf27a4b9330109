"""Images of our writing, as the kernel shows them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from forest import PHASES, Packs, content, file, image_mounted, link, looks, seen, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.environments.erofs import read_image, write_image
from dsec.environments.trees import BLOCK, Node, Segment, folder, whiteout

FILE = stat.S_IFREG | 0o644


def _tree(**children: Node) -> Node:
    root = folder()
    root.children = {os.fsencode(name): node for name, node in children.items()}
    return root


@pytest.fixture
def place() -> Path:
    """A folder on a file system that EROFS mounts plain files of."""
    made = Path(tempfile.mkdtemp(prefix="dsec-erofs-"))
    yield made
    shutil.rmtree(made)


@pytest.mark.root
@pytest.mark.slow
@settings(max_examples=60, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_kernel_shows_what_was_written(data: st.DataObject, packs: Packs) -> None:
    tree = data.draw(trees(packs))
    with tempfile.TemporaryDirectory(prefix="dsec-erofs-") as temporary:
        place = Path(temporary) / "image"
        with image_mounted(tree, packs, place) as mounted:
            assert seen(mounted) == looks(tree, packs)
        again = read_image(place / "image", {pack.digest: pack for pack in packs.packs})
        assert looks(again, packs) == looks(tree, packs)
        devices = [f"--device={packs.path(pack)}" for pack in write_image(again, place / "again")]
        assert (place / "again").read_bytes() == (place / "image").read_bytes()
        checked = subprocess.run(["fsck.erofs", "-d1", *devices, str(place / "image")], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.root
def test_sizes_beyond_4_gib_and_long_holes(packs: Packs, place: Path) -> None:
    pack = packs.packs[0]
    middle = (6 << 30) // BLOCK
    tree = _tree(
        terabyte=Node(FILE, size=1 << 40),
        most=Node(FILE, size=1 << 46),
        sparse=Node(FILE, size=(6 << 30) + 16 * BLOCK + 5, segments=(Segment(middle, 17, pack, 3),)),
    )
    with image_mounted(tree, packs, place / "image") as mounted:
        assert (mounted / "terabyte").stat().st_size == 1 << 40
        assert (mounted / "most").stat().st_size == 1 << 46
        with (mounted / "terabyte").open("rb") as opened:
            opened.seek((1 << 40) - 7)
            assert opened.read() == bytes(7)
        with (mounted / "sparse").open("rb") as opened:
            opened.seek(6 << 30)
            assert opened.read() == packs.data[pack.digest][3 * BLOCK : 19 * BLOCK + 5]
            opened.seek((6 << 30) - BLOCK)
            assert opened.read(BLOCK) == bytes(BLOCK)
    # the longest chunks that fit are chosen: no more than a few addresses for each
    assert (place / "image/image").stat().st_size <= 4 * BLOCK


def test_many_files_of_the_greatest_size_do_not_fill_the_store(place: Path) -> None:
    many = folder()
    for number in range(17):
        many.children[b"%d" % number] = Node(FILE, size=(1 << 63) - 1)
    with pytest.raises(ValueError, match="together they need"):
        write_image(many, place / "image")
    assert not (place / "image").exists() or (place / "image").stat().st_size < 1 << 20


@pytest.mark.root
@pytest.mark.slow
def test_a_folder_of_100_000_entries(place: Path) -> None:
    tree = _tree(many=folder())
    many = tree.children[b"many"]
    for number in range(100_000):
        many.children[b"entry %d" % number] = file(b"%d" % number)
    with image_mounted(tree, None, place / "image") as mounted:
        assert len(os.listdir(mounted / "many")) == 100_000
        for number in (0, 1, 9, 99, 31_337, 99_999):
            assert (mounted / f"many/entry {number}").read_text() == str(number)
        with pytest.raises(FileNotFoundError):
            (mounted / "many/entry 100000").stat()
    assert looks(read_image(place / "image/image")) == looks(tree)


@pytest.mark.root
def test_every_kind_of_inode(packs: Packs, place: Path) -> None:
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    acl = bytes.fromhex("0200000001000600ffffffff04000400ffffffff20000400ffffffff")
    shared = file(b"two names")
    tree = _tree(
        empty=Node(FILE),
        first=shared,
        second=shared,
        whiteout=whiteout(),
        null=Node(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 3)),
        disk=Node(stat.S_IFBLK | 0o660, gid=6, rdev=os.makedev(259, 70_000)),
        fifo=Node(stat.S_IFIFO | 0o600),
        socket=Node(stat.S_IFSOCK | 0o755),
        fast=link(b"target"),
        long=link(b"x" * 4095),
        setuid=Node(stat.S_IFREG | 0o6755, 1000, 100_000, -1, {b"security.capability": capability}, size=1, inline=b"\x7f"),
        old=folder(0o1777, mtime_ns=-(10**18)),
    )
    tree.children[b"n" * 255] = file(b"longest")
    tree.children[b"\xff\xfe"] = file(b"no text")
    tree.children[b"old"].xattrs = {b"trusted.overlay.opaque": b"y", b"system.posix_acl_default": acl, b"user.large": b"L" * 60_000}
    with image_mounted(tree, packs, place / "image") as mounted:
        assert seen(mounted) == looks(tree, packs)


@pytest.mark.root
def test_readers_share_contents_of_all_packs(packs: Packs, place: Path) -> None:
    segments = tuple(Segment(number, 1, packs.packs[number % 3], 60 - number) for number in range(48))
    tree = _tree(
        mixed=Node(FILE, size=48 * BLOCK - 100, segments=segments),
        whole=Node(FILE, size=64 * BLOCK, segments=(Segment(0, 64, packs.packs[2], 0),)),
    )
    with image_mounted(tree, packs, place / "image") as mounted:
        assert seen(mounted) == looks(tree, packs)


@pytest.mark.root
def test_pieces_of_two_packs_are_not_joined_by_their_places(packs: Packs, place: Path) -> None:
    """Where one pack's piece ends another's begins, counted in blocks: they follow each other in the file, and nowhere else."""
    first, second, _ = packs.packs
    pieces = {f"at{start}": (Segment(0, 4, first, start), Segment(4, 4, second, start + 4)) for start in range(50)}
    tree = _tree(**{name: Node(FILE, size=8 * BLOCK, segments=segments) for name, segments in pieces.items()})
    with image_mounted(tree, packs, place / "image") as mounted:
        assert seen(mounted) == looks(tree, packs)
    assert looks(read_image(place / "image/image"), packs) == looks(tree, packs)


@pytest.mark.root
def test_erofs_utils_read_our_images(packs: Packs, place: Path) -> None:
    """fsck.erofs extracts what we wrote, in one and in several packs; dump.erofs knows its features.

    Not files with holes: fsck.erofs 1.5 leaves holes out when it extracts, so that what follows moves up. It does check them (above).
    """
    first, second, _ = packs.packs
    tree = _tree(
        whole=Node(FILE, size=10 * BLOCK - 5, segments=(Segment(0, 10, first, 3),)),
        both=Node(FILE, size=10 * BLOCK - 5, segments=(Segment(0, 5, second, 1), Segment(5, 5, first, 40))),
        inline=file(b"inline"),
        link=link(b"whole"),
    )
    devices = [f"--device={packs.path(pack)}" for pack in write_image(tree, place / "image")]
    subprocess.run(["fsck.erofs", f"--extract={place / 'out'}", *devices, str(place / "image")], capture_output=True, check=True)
    for name in ("whole", "both", "inline"):
        assert (place / "out" / name).read_bytes() == content(tree.children[name.encode()], packs)
    assert os.readlink(place / "out/link") == "whole"
    shown = subprocess.run(["dump.erofs", "-s", *devices, str(place / "image")], capture_output=True, text=True, check=True).stdout
    assert "sb_csum mtime chunked_file device_table" in shown
    assert "inode count:                       5" in shown


@pytest.mark.root
def test_a_small_tree_is_one_block(place: Path) -> None:
    write_image(_tree(hello=file(b"hello")), place / "image")
    assert (place / "image").stat().st_size == BLOCK


def test_the_same_tree_gives_the_same_bytes(packs: Packs, place: Path) -> None:
    def grow(names: list[bytes]) -> Node:
        tree = folder()
        for name in names:
            tree.children[name] = Node(FILE, size=BLOCK, segments=(Segment(0, 1, packs.packs[len(name) % 3], 5),))
        return tree

    names = [b"n" * (1 + number % 200) + b"%d" % number for number in range(500)]
    first = write_image(grow(names), place / "first")
    second = write_image(grow(names[::-1]), place / "second")
    assert [pack.digest for pack in first] == [pack.digest for pack in second]
    digests = {hashlib.sha256((place / name).read_bytes()).hexdigest() for name in ("first", "second")}
    assert len(digests) == 1
