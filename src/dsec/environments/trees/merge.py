"""Layers laid over each other as overlayfs does it, on trees: only names move, no bytes.

The rules are those of the kernel's `Documentation/filesystems/overlayfs.rst` and of its lookup with `redirect_dir=follow`:

- A whiteout hides its name in all layers below; so does whatever is not a folder.
- A folder goes on below, under its own name in what its parent goes on in, if it is a folder there too; it keeps its own owner, mode,
  time and xattrs.
- An opaque folder does not go on. A redirect says where it goes on instead: a name beside it, or a path from the root of the layers
  below.

An opaque root is the one exception: overlayfs takes no notice of that, but images can say so, and here it hides all layers below.

A tree may be merged before it is known what lies below it. Then a merged folder must still say where it goes on; this is written as
whiteouts, opaque marks and absolute redirects again. Inputs are never changed, and the result shares nodes with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from dsec.environments.trees.model import OPAQUE, REDIRECT, Node

__all__ = ["ORIGIN", "collapse", "merge", "settle"]

ORIGIN: Final = b"trusted.overlay.origin"
"""On a folder that no other layer has: overlayfs looks for whiteouts in it, which it would list as names that are not there otherwise."""

_TYPE: Final = 0o170000
_CHARACTER_DEVICE: Final = 0o020000

_Path: TypeAlias = tuple[bytes, ...]


def merge(lower: Node, upper: Node, *, keep_whiteouts: bool) -> Node:
    """The tree that overlayfs shows of `upper` over `lower`.

    With `keep_whiteouts` other layers may lie below: the result over them shows what the two over them show. Without, `lower` is the
    bottom: no whiteouts and no marks are left. Raises ValueError for a redirect that is none.
    """
    return settle(_lay(lower, upper), keep_whiteouts=keep_whiteouts)


def collapse(trees: Iterable[Node], *, keep_whiteouts: bool) -> Node:
    """Merge many, from the bottom to the top, as `merge` does two; one alone is settled. Raises ValueError if there is none."""
    merged: Node | None = None
    for tree in trees:
        merged = tree if merged is None else _lay(merged, tree)
    if merged is None:
        raise ValueError("no tree to collapse")
    return settle(merged, keep_whiteouts=keep_whiteouts)


def settle(tree: Node, *, keep_whiteouts: bool) -> Node:
    """Make a tree a layer of its own, at the bottom or, with `keep_whiteouts`, above others.

    At the bottom whiteouts and marks go, as overlayfs takes no notice of them there. Above others, those whiteouts go that can hide
    nothing, and folders with whiteouts are marked with ORIGIN.
    """
    order: list[tuple[Node, bool]] = []
    waiting = [(tree, False)]
    while waiting:
        folder, alone = waiting.pop()
        order.append((folder, alone))
        waiting += [
            (child, child.xattrs.get(OPAQUE) == b"y" or (alone and REDIRECT not in child.xattrs))
            for child in _children(folder).values()
            if child.children is not None
        ]
    replaced: dict[Node, Node] = {}
    for folder, alone in reversed(order):
        children = _children(folder)
        whiteouts = [name for name, child in children.items() if child.mode & _TYPE == _CHARACTER_DEVICE and child.rdev == 0]
        drop = bool(whiteouts) and (alone or not keep_whiteouts)
        xattrs = folder.xattrs
        if not keep_whiteouts:
            xattrs = _without_marks(xattrs)
        elif (ORIGIN in xattrs) != (bool(whiteouts) and not drop):
            xattrs = {name: value for name, value in xattrs.items() if name != ORIGIN} if ORIGIN in xattrs else {**xattrs, ORIGIN: b""}
        changed = {name: replaced[child] for name, child in children.items() if child.children is not None and child in replaced}
        if drop or changed or xattrs is not folder.xattrs:
            children = {**children, **changed}
            if drop:
                for name in whiteouts:
                    del children[name]
            replaced[folder] = Node(folder.mode, folder.uid, folder.gid, folder.mtime_ns, xattrs, children=children)
    return replaced.get(tree, tree)


def _children(folder: Node) -> dict[bytes, Node]:
    if folder.children is None:
        raise ValueError("the root of a layer must be a folder")
    return folder.children


def _without_marks(xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
    if OPAQUE in xattrs or REDIRECT in xattrs or ORIGIN in xattrs:
        return {name: value for name, value in xattrs.items() if name not in (OPAQUE, REDIRECT, ORIGIN)}
    return xattrs


def _lay(lower: Node, upper: Node) -> Node:
    """Merge two trees under which more may lie. `below` is the path at which a folder goes on there, None if it does not."""
    merged = _over(upper)
    redirected = False
    bottom: Node | None = lower
    base: _Path | None = ()
    if upper.xattrs.get(OPAQUE) == b"y":
        bottom = base = None
    elif lower.xattrs.get(OPAQUE) == b"y":
        base = None
    if base is None:
        merged.xattrs[OPAQUE] = b"y"
    waiting: list[tuple[Node, Node, Node | None, _Path | None]] = [(merged, upper, bottom, base)]
    while waiting:
        result, folder, under, below = waiting.pop()
        children = dict(_children(under)) if under is not None else {}
        for name, child in _children(folder).items():
            if child.children is None:
                children[name] = child
                continue
            start, at = under, below
            path: _Path = (name,)
            if child.xattrs.get(OPAQUE) == b"y":
                start = at = None
            elif REDIRECT in child.xattrs:
                redirected = True
                absolute, path = _redirect(child.xattrs[REDIRECT])
                if absolute:
                    start, at = bottom, base
            next_under, next_below = _follow(start, at, path, base)
            new = children[name] = _over(child)
            own = None if below is None else (*below, name)
            if next_below is None and own is not None:
                new.xattrs[OPAQUE] = b"y"
            elif next_below is not None and next_below != own:
                new.xattrs[REDIRECT] = b"/" + b"/".join(next_below)
            waiting.append((new, child, next_under, next_below))
        result.children = children
    if redirected:
        _unshare(merged)
    return merged


def _over(folder: Node) -> Node:
    """A folder like this one, still without children and marks."""
    return Node(folder.mode, folder.uid, folder.gid, folder.mtime_ns, dict(_without_marks(folder.xattrs)), children={})


def _redirect(value: bytes) -> tuple[bool, _Path]:
    absolute = value.startswith(b"/")
    path = tuple(value[1:].split(b"/")) if absolute else (value,)
    if not all(path) or (not absolute and b"/" in value) or b"\0" in value:
        raise ValueError(f"a redirect to {value!r}: a name or an absolute path is allowed")
    return absolute, path


def _follow(under: Node | None, below: _Path | None, path: _Path, base: _Path | None) -> tuple[Node | None, _Path | None]:
    """Where a path leads to in a tree, and from there in the layers below it; None each where it ends."""
    for name in path:
        child = _children(under).get(name) if under is not None else None
        if child is None:
            under = None
            below = None if below is None else (*below, name)
            continue
        if child.children is None:
            return None, None
        under = child
        if child.xattrs.get(OPAQUE) == b"y":
            below = None
        elif REDIRECT in child.xattrs:
            absolute, target = _redirect(child.xattrs[REDIRECT])
            start = base if absolute else below
            below = None if start is None else start + target
        else:
            below = None if below is None else (*below, name)
    return under, below


def _unshare(tree: Node) -> None:
    """Where a folder of the lower tree was redirected to, and is still there under its old name: make it two."""
    seen = {tree}
    waiting = [tree]
    while waiting:
        folder = waiting.pop()
        children = _children(folder)
        for name, child in children.items():
            if child.children is None:
                continue
            if child in seen:
                child = children[name] = Node(
                    child.mode, child.uid, child.gid, child.mtime_ns, dict(child.xattrs), children=dict(child.children)
                )
            seen.add(child)
            waiting.append(child)
