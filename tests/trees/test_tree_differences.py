"""What is said of two trees."""

from __future__ import annotations

import stat

import pytest
from forest import Packs, file, link, looks, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.environments.trees import BLOCK, ORIGIN, Node, Pack, Segment, compare, folder

FILE = stat.S_IFREG | 0o644


def _tree(**children: Node) -> Node:
    root = folder()
    root.children = {name.encode(): node for name, node in children.items()}
    return root


def _stored(pack: Pack, start: int = 0) -> Node:
    return Node(FILE, size=BLOCK, segments=(Segment(0, 1, pack, start),))


@pytest.mark.parametrize(
    ("old", "new", "aspects"),
    [
        (file(b"a"), file(b"b"), ("content",)),
        (file(b"a"), file(b"ab"), ("content",)),
        (file(b"a"), link(b"a"), ("type", "mode")),
        (link(b"a"), link(b"b"), ("target",)),
        (Node(stat.S_IFCHR, rdev=1), Node(stat.S_IFCHR, rdev=2), ("device",)),
        (file(b"a"), file(b"a", uid=1), ("owner",)),
        (file(b"a"), file(b"a", gid=1), ("owner",)),
        (file(b"a"), file(b"a", mtime_ns=1), ("time",)),
        (file(b"a"), file(b"a", xattrs={b"user.a": b""}), ("xattr",)),
        (folder(0o755), folder(0o700), ("mode",)),
        (file(b"a", mtime_ns=1), file(b"b", uid=1), ("content", "owner", "time")),
        (Node(FILE), file(b""), ()),
        (file(b"a"), file(b"a"), ()),
        (_stored(Pack("sha256:1", BLOCK)), _stored(Pack("sha256:1", BLOCK)), ()),
        (_stored(Pack("sha256:1", BLOCK)), _stored(Pack("sha256:2", BLOCK)), ("content",)),
    ],
)
def test_aspects(old: Node, new: Node, aspects: tuple[str, ...]) -> None:
    differences = list(compare(_tree(a=old), _tree(a=new)))
    assert [difference.aspects for difference in differences] == ([aspects] if aspects else [])


def test_new_and_lost_folders_are_listed_with_all_they_hold() -> None:
    before = _tree(gone=_tree(a=file(b"12")), same=file(b"x"), kind=_tree(b=file(b"1")))
    after = _tree(new=_tree(c=_tree(d=file(b"123"))), same=file(b"x"), kind=file(b"1234"))
    found = [(item.path, item.before is not None, item.after is not None, item.grown) for item in compare(before, after)]
    assert found == [
        (b"gone", True, False, 0),
        (b"gone/a", True, False, -2),
        (b"kind", True, True, 4),
        (b"kind/b", True, False, -1),
        (b"new", False, True, 0),
        (b"new/c", False, True, 0),
        (b"new/c/d", False, True, 3),
    ]


def test_contents_in_other_packs_are_asked_for() -> None:
    before, after = _stored(Pack("sha256:1", BLOCK)), _stored(Pack("sha256:2", 9 * BLOCK), 3)
    asked: list[Node] = []

    def digest(node: Node) -> str:
        asked.append(node)
        return "the same"

    assert not list(compare(_tree(a=before), _tree(a=after), content=digest))
    assert asked == [before, after]
    assert list(compare(_tree(a=before), _tree(a=after), content=id))


def test_marks_that_nobody_sees_are_no_difference() -> None:
    marked = folder()
    marked.xattrs[ORIGIN] = b""
    assert not list(compare(_tree(d=folder()), _tree(d=marked)))


def test_what_both_share_is_not_looked_at() -> None:
    shared = folder()
    shared.children = {b"broken": Node(FILE, size=-1), b"deep": shared}
    assert not list(compare(_tree(a=shared), _tree(a=shared)))


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_differences_are_those_of_the_plain_model(data: st.DataObject, packs: Packs) -> None:
    before, after = data.draw(trees(packs, largest=12)), data.draw(trees(packs, largest=12))
    old, new = looks(before, packs), looks(after, packs)
    # names of one file are no aspect of it
    expected = {
        path for path in old.keys() | new.keys() if (old[path][:6] if path in old else None) != (new[path][:6] if path in new else None)
    }

    def content(node: Node) -> tuple[object, ...]:
        return looks(_tree(a=node), packs)[b"/a"][4]

    assert {b"/" + item.path if item.path else b"" for item in compare(before, after, content=content)} == expected
