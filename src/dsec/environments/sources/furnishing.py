"""What a sandbox's root must have, put into trees that may lie over others."""

from __future__ import annotations

import os
import stat
from typing import Final

from dsec.environments.sources.refusals import refuse
from dsec.environments.sources.view import View
from dsec.environments.trees import OPAQUE, Node, folder

__all__ = ["add_folder", "furnish_base", "nest", "put_file"]

_BASE_FOLDERS: Final = (("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("tmp", 0o1777), ("etc", 0o755), ("run", 0o755), ("root", 0o700))
_BASE_FILES: Final = (
    ("etc/hosts", b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"),
    ("etc/hostname", b"sandbox\n"),
    ("etc/resolv.conf", b""),
)
_STANDARD_MODES: Final = {**{name.encode(): mode for name, mode in _BASE_FOLDERS}, b"var/tmp": 0o1777, b"dev/shm": 0o1777}
_NAME_LIMIT: Final = 255


def furnish_base(trees: list[Node]) -> None:
    """What a sandbox's root must have to be mounted and bound over; what is there stays, except links that lead nowhere.

    `trees` from the bottom; what is missing goes into the topmost.
    """
    for name, mode in _BASE_FOLDERS:
        path = name.encode().split(b"/")
        if View(trees).follow(path) is None:
            _put(trees, path, folder(mode))
    for name, content in _BASE_FILES:
        if View(trees).follow(name.encode().split(b"/")) is None:
            put_file(trees, name, content)


def put_file(trees: list[Node], name: str, content: bytes) -> None:
    """A small file, owned by root, in the place of what is there."""
    _put(trees, name.encode().split(b"/"), Node(stat.S_IFREG | 0o644, size=len(content), inline=content))


def add_folder(trees: list[Node], name: str) -> None:
    """An empty folder with those above it, owned by root, if nothing is there and it can be made."""
    path = [part for part in os.fsencode(name).split(b"/") if part not in (b"", b".")]
    if b".." in path or b"\0" in b"".join(path) or any(len(part) > _NAME_LIMIT for part in path):
        return
    view = View(trees)
    if view.follow(path) is not None:
        return
    there, missing = 0, len(path)  # parts that lead somewhere, and that do not
    while missing - there > 1:
        middle = (there + missing) // 2
        if view.follow(path[:middle]) is not None:
            there = middle
        else:
            missing = middle
    above = view.follow(path[:there])
    if above is None or above[1].children is None or view.at(path[:missing]) is not None:  # no folder, or a link that leads nowhere
        return
    made = top = _standard(path[:missing])
    for length in range(missing + 1, len(path) + 1):
        below = _standard(path[:length])
        made.children, made = {path[length - 1]: below}, below
    _put(trees, path[:missing], top)


def _standard(path: list[bytes]) -> Node:
    """An empty folder as systems have it there: what lies over another layer's gives it its own mode."""
    return folder(_STANDARD_MODES.get(b"/".join(path), 0o755))


def nest(tree: Node, destination: str) -> Node:
    """The tree as it looks from the root that has it in the folder `destination`; folders on the way are as systems have them."""
    path = [os.fsencode(part) for part in destination.split("/") if part]
    for length in range(len(path) - 1, -1, -1):
        above = _standard(path[:length])
        above.children = {path[length]: tree}
        tree = above
    return tree


def _put(trees: list[Node], path: list[bytes], node: Node) -> None:
    """Into the topmost tree; folders on the way are there in some tree, and are the same in it."""
    name = b"/".join(path)
    view = View(trees)
    found = view.follow(path[:-1])
    if found is None or found[1].children is None:
        refuse(name, "lies below something that is no folder")
    place = trees[-1]
    for depth, part in enumerate(found[0], 1):
        children = place.children
        assert children is not None
        there = children.get(part)
        if there is None or there.children is None:
            below = view.at(found[0][:depth])
            assert below is not None
            xattrs = {key: value for key, value in below.xattrs.items() if key != OPAQUE}
            there = children[part] = Node(below.mode, below.uid, below.gid, below.mtime_ns, xattrs, children={})
        place = there
    assert place.children is not None
    place.children[path[-1]] = node
