"""In what two trees differ, path by path."""

from __future__ import annotations

import stat
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from dsec.environments.trees.merge import ORIGIN
from dsec.environments.trees.model import Node

__all__ = ["Aspect", "Difference", "compare"]

Aspect: TypeAlias = Literal["type", "content", "target", "device", "mode", "owner", "xattr", "time"]

_IGNORED: Final = frozenset((ORIGIN,))


@dataclass(slots=True, frozen=True)
class Difference:
    """A path that is not the same in both. `before` is None if it is new, `after` if it is gone."""

    path: bytes
    """From the root, without a leading slash; empty for the root itself."""
    before: Node | None
    after: Node | None
    aspects: tuple[Aspect, ...] = ()
    """Of what is in both, in what it differs."""

    @property
    def grown(self) -> int:
        """Bytes that the content grew by, negative if it shrank."""
        return (self.after.size if self.after else 0) - (self.before.size if self.before else 0)


def compare(before: Node, after: Node, *, content: Callable[[Node], Hashable] | None = None) -> Iterator[Difference]:
    """All differences, in the order of their paths' names, a folder before what it holds; what a new or lost folder holds is listed too.

    Contents in the same blocks of the same packs are equal. Others of one size are asked for: `content` gives a value that equal contents
    have in common (as the digests of their segments). Without it they count as different.
    """
    waiting: list[tuple[bytes, Node | None, Node | None]] = [(b"", before, after)]
    while waiting:
        path, old, new = waiting.pop()
        if old is new:
            continue
        if old is None or new is None:
            yield Difference(path, old, new)
        elif aspects := _aspects(old, new, content):
            yield Difference(path, old, new, aspects)
        old_children = (old.children if old is not None else None) or {}
        new_children = (new.children if new is not None else None) or {}
        prefix = path + b"/" if path else b""
        # what is shared by both trees is the same all the way down
        names = [name for name in old_children.keys() | new_children.keys() if old_children.get(name) is not new_children.get(name)]
        names.sort(reverse=True)
        waiting += [(prefix + name, old_children.get(name), new_children.get(name)) for name in names]


def _aspects(old: Node, new: Node, content: Callable[[Node], Hashable] | None) -> tuple[Aspect, ...]:
    found: list[Aspect] = []
    if stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode):
        found.append("type")
    elif old.is_file:
        if not _same_content(old, new, content):
            found.append("content")
    elif old.target != new.target:
        found.append("target")
    elif old.rdev != new.rdev:
        found.append("device")
    if stat.S_IMODE(old.mode) != stat.S_IMODE(new.mode):
        found.append("mode")
    if (old.uid, old.gid) != (new.uid, new.gid):
        found.append("owner")
    if old.xattrs != new.xattrs and _seen(old.xattrs) != _seen(new.xattrs):
        found.append("xattr")
    if old.mtime_ns != new.mtime_ns:
        found.append("time")
    return tuple(found)


def _seen(xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in xattrs.items() if name not in _IGNORED}


def _same_content(old: Node, new: Node, content: Callable[[Node], Hashable] | None) -> bool:
    if old.size != new.size:
        return False
    if old.inline is not None and new.inline is not None:
        return old.inline == new.inline
    if not old.size or (old.inline is new.inline and _blocks(old) == _blocks(new)):
        return True
    return content is not None and content(old) == content(new)


def _blocks(node: Node) -> list[tuple[int, int, str, int]]:
    """A file's segments by the packs' digests, so that two reads of an image give equal ones."""
    return [(segment.at, segment.count, segment.pack.digest, segment.start) for segment in node.segments]
