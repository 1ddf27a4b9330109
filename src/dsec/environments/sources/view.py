"""Layers over each other, looked at without merging them: what a path leads to, links and all."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from typing import Final

from dsec.environments.trees import OPAQUE, Node, is_whiteout

__all__ = ["View"]

_LINKS_LIMIT: Final = 40
_STEPS_LIMIT: Final = 1024
"""From folder to folder below links, in one look-up."""

_Folder = tuple[Node, ...]
"""The folders that make up one, the topmost first."""


class View:
    """`trees` from the bottom to the top. None has redirects: layers of images do not."""

    def __init__(self, trees: Iterable[Node]) -> None:
        roots: list[Node] = []
        for tree in reversed(list(trees)):
            roots.append(tree)
            if OPAQUE in tree.xattrs:
                break
        self._root: _Folder = tuple(roots)

    def at(self, path: Sequence[bytes]) -> Node | None:
        """What has this path, the last part not followed if it is a link."""
        found = self._follow(path, last=False)
        return found[1] if found is not None else None

    def follow(self, path: Sequence[bytes]) -> tuple[list[bytes], Node] | None:
        """What is at the end of all links, with its real path; None if they lead nowhere or round and round."""
        return self._follow(path, last=True)

    def names(self) -> Iterable[bytes]:
        """What the root holds."""
        return {name for folder in self._root for name in folder.children or () if _step(self._root, name) is not None}

    def _follow(self, path: Sequence[bytes], *, last: bool) -> tuple[list[bytes], Node] | None:
        if not self._root:
            return None
        stack: list[tuple[bytes, _Folder]] = [(b"", self._root)]
        pending = list(reversed(path))
        links = steps = 0
        while pending:
            part = pending.pop()
            steps += links > 0
            if steps > _STEPS_LIMIT:
                return None
            if part == b"..":
                if len(stack) > 1:
                    stack.pop()
                continue
            node = _step(stack[-1][1], part)
            if isinstance(node, tuple):
                stack.append((part, node))
            elif node is None:
                return None
            elif stat.S_ISLNK(node.mode) and (pending or last):
                links += 1
                if links > _LINKS_LIMIT:
                    return None
                pending += [step for step in reversed(node.target.split(b"/")) if step not in (b"", b".")]
                if node.target.startswith(b"/"):
                    del stack[1:]
            else:
                return ([*(name for name, _ in stack[1:]), part], node) if not pending else None
        return [name for name, _ in stack[1:]], stack[-1][1][0]


def _step(folder: _Folder, name: bytes) -> _Folder | Node | None:
    gathered: list[Node] = []
    for layer in folder:
        child = (layer.children or {}).get(name)
        if child is None:
            continue
        if child.children is None:
            if not gathered and not is_whiteout(child):
                return child
            break
        gathered.append(child)
        if OPAQUE in child.xattrs:
            break
    return tuple(gathered) or None
