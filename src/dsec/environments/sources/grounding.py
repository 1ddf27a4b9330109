"""What a layer leaves to those below it is decided, once these are known: its tree becomes one that overlayfs can lay over them.

A tar may name a file without the folders above it, or as a hard link to one of a layer below. Applied to an unpacked image, the file goes
where the folder's path leads there, through links too, and the folder stays as it is. So it is here.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from dsec.environments.sources.builder import BELOW, LINK, MUST_EXIST, PARENT
from dsec.environments.sources.refusals import refuse
from dsec.environments.sources.view import View
from dsec.environments.trees import OPAQUE, Node, folder, is_whiteout, whiteout

__all__ = ["ground"]

_PASSES: Final = 40

_Path = tuple[bytes, ...]


def ground(tree: Node, below: View | None) -> Node:
    """Decide in `tree`, which is changed and returned. `below` is what it lies over, None for nothing."""
    return _Grounding(tree, below if below is not None else View([])).done()


class _Grounding:
    def __init__(self, tree: Node, below: View) -> None:
        self._tree = tree
        self._below = below
        self._links: dict[Node, list[tuple[_Path, Node]]] = {}
        self._moved = False
        self._hiding: set[Node] = set()
        self._objections: list[tuple[bytes, str]] = []
        """Members that can have no place, unless something is moved yet that gives them one."""

    def done(self) -> Node:
        root = self._tree
        if BELOW in root.xattrs:
            self._take_over(root, self._below.at(()))
        if OPAQUE in root.xattrs:
            self._open_root()
        for _ in range(_PASSES):  # what was moved may hold what is to be moved on
            self._moved = False
            self._links.clear()
            self._hiding = _only_hiding(root)
            self._objections.clear()
            waiting: list[tuple[Node, _Path, bool]] = [(root, (), False)]
            while waiting:
                waiting += self._visit(*waiting.pop())
            if not self._moved:
                break
        else:
            self._objections.append((b"", "lies below links that never end"))
        if self._objections:
            refuse(*self._objections[0])
        for placeholder, places in self._links.items():
            self._join(placeholder, places)
        return root

    def _open_root(self) -> None:
        """Overlayfs takes no notice of an opaque root: hide what is there by name."""
        del self._tree.xattrs[OPAQUE]
        children = _children(self._tree)
        for name in self._below.names():
            there = children.setdefault(name, whiteout())
            if there.children is not None:
                there.xattrs[OPAQUE] = b"y"

    def _visit(self, parent: Node, path: _Path, hidden: bool) -> list[tuple[Node, _Path, bool]]:
        """Decide what is marked in a folder; returns the folders in it. `hidden`: nothing of the layers below is to be seen here."""
        children = _children(parent)
        folders: list[tuple[Node, _Path, bool]] = []
        for name, node in list(children.items()):
            place = (*path, name)
            if node.children is None:
                if node.xattrs.get(BELOW) == LINK:
                    self._links.setdefault(node, []).append((place, parent))
                continue
            if BELOW in node.xattrs:
                found = None if hidden else self._below.at(place)
                if (found is None or found.children is None) and node in self._hiding:
                    target = self._below.follow(place) if found is not None else None
                    if target is None or target[1].children is None:
                        del children[name]  # there is nothing to hide
                        continue
                if found is not None and found.children is None:
                    self._move(children, name, node, place, found)
                    continue
                if found is None and node.xattrs[BELOW] == MUST_EXIST:
                    self._objections.append((b"/".join(place), "lies below a link that leads nowhere"))
                    continue
                self._take_over(node, found)
            folders.append((node, place, hidden or OPAQUE in node.xattrs))
        return folders

    def _take_over(self, node: Node, found: Node | None) -> None:
        """The folder was only named as the way to something: it is what it is below."""
        del node.xattrs[BELOW]
        if found is not None and found is not node:
            opaque = node.xattrs.get(OPAQUE)
            node.mode, node.uid, node.gid, node.mtime_ns = found.mode, found.uid, found.gid, found.mtime_ns
            node.xattrs = {name: value for name, value in found.xattrs.items() if name != OPAQUE}
            if opaque is not None:
                node.xattrs[OPAQUE] = opaque

    def _move(self, children: dict[bytes, Node], name: bytes, node: Node, place: _Path, found: Node) -> None:
        """It is a link below: what was put in it belongs where that leads."""
        if not stat.S_ISLNK(found.mode):
            self._objections.append((b"/".join(place), "lies below something that is no folder"))
            return
        target = self._below.follow(place)
        if target is None or target[1].children is None:
            self._objections.append((b"/".join(place), "lies below a link that leads nowhere"))
            return
        del children[name]
        parent = self._tree
        for part in target[0]:
            there = _children(parent).get(part)
            if there is None or is_whiteout(there):
                fresh = Node(stat.S_IFDIR | 0o755, xattrs={BELOW: PARENT}, children={})
                if there is not None:
                    fresh = folder()
                    fresh.xattrs[OPAQUE] = b"y"
                _children(parent)[part] = there = fresh
            if there.children is None:
                refuse(b"/".join(place), "lies below something that is no folder")
            parent = there
        if OPAQUE in node.xattrs:
            parent.xattrs[OPAQUE] = b"y"
        _pour(node, parent)
        self._moved = True

    def _join(self, placeholder: Node, places: list[tuple[_Path, Node]]) -> None:
        target = tuple(placeholder.target.split(b"/"))
        name = b"/".join(places[0][0])
        origin = self._own(target)
        if origin is None:
            real = self._below.follow(target[:-1])
            origin = self._below.at((*real[0], target[-1])) if real is not None else None
            if real is not None and origin is not None and origin.children is None and not is_whiteout(origin):
                self._copy_up((*real[0], target[-1]), origin)
        if origin is None or is_whiteout(origin):
            refuse(name, f"is a hard link to {os.fsdecode(placeholder.target)!r:.300}, which is not in the image")
        if origin.children is not None:
            refuse(name, "is a hard link to a folder")
        for place, parent in places:
            _children(parent)[place[-1]] = origin

    def _own(self, path: _Path) -> Node | None:
        found = View([self._tree]).at(path)
        return found if found is not None and BELOW not in found.xattrs else None

    def _copy_up(self, path: _Path, origin: Node) -> None:
        """The name below is one more name of the same file here; unless the layer has something else in its place."""
        parent = self._tree
        for depth, part in enumerate(path[:-1]):
            there = _children(parent).get(part)
            if there is None:
                there = _children(parent)[part] = folder()
                there.xattrs[BELOW] = PARENT
                self._take_over(there, self._below.at(path[: depth + 1]))
            if there.children is None or OPAQUE in there.xattrs:
                return
            parent = there
        _children(parent).setdefault(path[-1], origin)


def _only_hiding(root: Node) -> set[Node]:
    """The folders with nothing in them but whiteouts, and folders that are named only as the way to those."""
    order = [root]
    for above in order:
        order.extend(node for node in _children(above).values() if node.children is not None)
    found: set[Node] = set()
    for above in reversed(order):
        if BELOW in above.xattrs and all(node in found or is_whiteout(node) for node in _children(above).values()):
            found.add(above)
    return found


def _children(node: Node) -> dict[bytes, Node]:
    assert node.children is not None
    return node.children


def _pour(source: Node, target: Node) -> None:
    """What is in one folder goes into another. What is there too gives way, but to whiteouts, which are for the layers below alone."""
    waiting = [(source, target)]
    while waiting:
        above, into = waiting.pop()
        for name, node in _children(above).items():
            there = _children(into).get(name)
            if there is None:
                _children(into)[name] = node
            elif node.children is None or there.children is None:
                hiding, kept = (node, there) if is_whiteout(node) else (there, node)
                _children(into)[name] = kept
                if is_whiteout(hiding) and kept.children is not None:
                    kept.xattrs.pop(BELOW, None)
                    kept.xattrs[OPAQUE] = b"y"
            else:
                opaque = OPAQUE in node.xattrs or OPAQUE in there.xattrs
                if BELOW not in node.xattrs:
                    there.mode, there.uid, there.gid, there.mtime_ns = node.mode, node.uid, node.gid, node.mtime_ns
                    there.xattrs = node.xattrs
                if opaque:
                    there.xattrs[OPAQUE] = b"y"
                waiting.append((node, there))
