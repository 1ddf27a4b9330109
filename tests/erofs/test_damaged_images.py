"""Images that are damaged, and trees that no image can hold."""

from __future__ import annotations

import io
import os
import random
import stat
import struct
from typing import Any

import pytest
from forest import Packs, file, link, looks, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.environments.erofs import holds_xattr, read_image, write_image
from dsec.environments.erofs.layout import BLOCK, SUPERBLOCK_AT, checksum
from dsec.environments.trees import Node, Pack, Segment, folder

FILE = stat.S_IFREG | 0o644
_USED = 1100
"""Bytes from the superblock on that the image of `_full` uses."""
PACK = Pack("sha256:" + "ab" * 32, 8 * BLOCK)


def _image(tree: Node) -> bytearray:
    file = io.BytesIO()
    write_image(tree, file)
    return bytearray(file.getvalue())


def _tree(**children: Node) -> Node:
    root = folder()
    root.children = {os.fsencode(name): node for name, node in children.items()}
    return root


def _full() -> Node:
    tree = _tree(
        a=file(b"inline", xattrs={b"user.x": b"1", b"trusted.overlay.opaque": b"y"}),
        b=Node(FILE, size=8 * BLOCK, segments=(Segment(0, 2, PACK, 1), Segment(4, 2, PACK, 5))),
        c=link(b"target"),
        d=_tree(e=folder(), f=Node(stat.S_IFCHR, rdev=os.makedev(1, 3))),
    )
    tree.children[b"h"] = tree.children[b"a"]
    return tree


def _sealed(image: bytearray) -> bytes:
    """With the checksum that belongs to it, so that what comes after is reached."""
    struct.pack_into("<I", image, SUPERBLOCK_AT + 4, checksum(image))
    return bytes(image)


def _read(image: bytes) -> None:
    try:
        tree = read_image(io.BytesIO(image))
    except ValueError:
        return
    # what is read can be written: nothing that is not a tree came out
    write_image(tree, io.BytesIO())


@given(st.binary(max_size=6000))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="EROFS"):
        read_image(io.BytesIO(data))


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(damage=st.lists(st.tuples(st.integers(0, _USED - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_give_a_tree_or_a_refusal(damage: list[tuple[int, int]]) -> None:
    image = _image(_full())
    for at, value in damage:
        image[SUPERBLOCK_AT + at] = value
    _read(_sealed(image))


@pytest.mark.slow
def test_wild_numbers_give_a_tree_or_a_refusal() -> None:
    """Every field of 4 bytes set to what breaks sums: the largest, the largest with a sign, a little, nothing."""
    whole = _image(_full())
    for at in range(SUPERBLOCK_AT, SUPERBLOCK_AT + _USED, 4):
        for value in (0xFFFFFFFF, 0x7FFFFFFF, 1, 0, random.Random(at).getrandbits(32)):
            image = bytearray(whole)
            struct.pack_into("<I", image, at, value)
            _read(_sealed(image))


@pytest.mark.parametrize("length", [0, 1, 1024, 1152, BLOCK - 1, BLOCK, 2 * BLOCK])
def test_a_truncated_image_is_refused(length: int) -> None:
    image = _image(_tree(a=file(bytes(3 * BLOCK))))
    with pytest.raises(ValueError, match="truncated"):
        read_image(io.BytesIO(image[:length]))


def test_a_flipped_bit_in_the_superblock_is_noticed() -> None:
    image = _image(_full())
    image[SUPERBLOCK_AT + 100] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        read_image(io.BytesIO(image))


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_read_and_written_again_it_is_the_same(data: st.DataObject, packs: Packs) -> None:
    tree = data.draw(trees(packs))
    image = _image(tree)
    again = read_image(io.BytesIO(image))
    assert looks(again, packs) == looks(tree, packs)
    assert _image(again) == image


def test_packs_are_shared_between_images() -> None:
    known: dict[str, Pack] = {}
    image = _image(_full())
    first, second = (read_image(io.BytesIO(image), known) for _ in range(2))
    assert list(known) == [PACK.digest]
    assert first.children[b"b"].segments == second.children[b"b"].segments
    known[PACK.digest] = Pack(PACK.digest, BLOCK)
    with pytest.raises(ValueError, match="bytes and not"):
        read_image(io.BytesIO(image), known)


def _chain_into_itself() -> Node:
    tree = _tree(a=folder())
    tree.children[b"a"].children[b"b"] = tree
    return tree


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (file(b""), "root"),
        (_tree(**{"n" * 256: file()}), "256 bytes"),
        (_tree(**{"": file()}), "or of none"),
        (_tree(**{"a/b": file()}), "slash"),
        (_tree(**{"a\0b": file()}), "NUL"),
        (_tree(**{"..": file()}), "named"),
        (_tree(a=link(b"")), "target"),
        (_tree(a=link(b"t" * 4096)), "target"),
        (_tree(a=Node(0o644)), "mode"),
        (_tree(a=Node(stat.S_IFDIR | 0o755)), "mode"),
        (_tree(a=Node(stat.S_IFCHR, rdev=os.makedev(4096, 0))), "device number"),
        (_tree(a=Node(FILE, size=3, inline=b"four")), "inline"),
        (_tree(a=Node(FILE, size=BLOCK, segments=(Segment(0, 1, Pack("", BLOCK), 0),))), "not finished"),
        (_tree(a=Node(FILE, size=BLOCK, segments=(Segment(0, 1, Pack(PACK.digest, 0), 0),))), "not finished"),
        (_tree(a=Node(FILE, size=BLOCK, segments=(Segment(0, 1, PACK, 8),))), "outside"),
        (_tree(a=Node(FILE, size=2 * BLOCK, segments=(Segment(0, 2, PACK, 0), Segment(1, 1, PACK, 0)))), "overlap"),
        (_tree(a=Node(FILE, size=BLOCK, segments=(Segment(0, 2, PACK, 0),))), "beyond its end"),
        (_tree(a=Node(FILE, size=1 << 40, segments=(Segment(1, 1, PACK, 0),))), "so fine"),
        (_tree(a=Node(FILE, size=-1)), "-1 bytes"),
        (_tree(a=file(b"", xattrs={b"system.nfs4_acl": b""})), "attribute"),
        (_tree(a=file(b"", xattrs={b"user.": b""})), "attribute"),
        (_tree(a=file(b"", xattrs={b"user.a": bytes(65536)})), "65536"),
        (_tree(a=file(b"", xattrs={b"user.%d" % number: bytes(60_000) for number in range(5)})), "on one file"),
        (_chain_into_itself(), "twice"),
    ],
)
def test_what_no_image_can_hold_is_refused_at_the_door(tree: Node, complaint: str) -> None:
    written = io.BytesIO()
    with pytest.raises(ValueError, match=complaint):
        write_image(tree, written)
    assert not written.getvalue()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [({"uid": -1}, "owner"), ({"gid": 1 << 32}, "owner"), ({"mtime_ns": 1 << 100}, "time"), ({"mode": 1 << 16 | FILE}, "mode")],
)
def test_numbers_out_of_range_are_refused(fields: dict[str, Any], complaint: str) -> None:
    written = io.BytesIO()
    with pytest.raises(ValueError, match=complaint):
        write_image(_tree(a=Node(**{"mode": FILE, **fields})), written)
    assert not written.getvalue()


def test_names_of_attributes() -> None:
    assert all(map(holds_xattr, [b"user.a", b"trusted.overlay.opaque", b"security.capability", b"system.posix_acl_access"]))
    assert not any(
        map(holds_xattr, [b"user.", b"system.nfs4_acl", b"btrfs.compression", b"system.posix_acl_access.more", b"user." + b"n" * 256])
    )
