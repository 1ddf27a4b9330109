"""Growing a tree on the word of a stranger: every name is looked up inside the tree, links and all.

A symbolic link in the tree may point anywhere; it is followed as it would be in a sandbox that has the tree as its root, so honest ones
work and none leads out. Names with `..` are refused; a leading `/` is dropped.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable
from typing import Final, NoReturn

from dsec.environments.sources.refusals import refuse
from dsec.environments.trees import OPAQUE, Node, folder, whiteout
from libdsec.errors import InvalidArgument, QuotaExceeded

__all__ = ["BELOW", "LINK", "MUST_EXIST", "PARENT", "Tally", "TreeBuilder", "split"]

BELOW: Final = b"trusted.dsec.below"
"""Mark of a node that only the layers below can make whole; no tree that is mounted has it. Its values:"""

PARENT: Final = b"parent"
"""A folder that the layer names only as the way to something else: below it may be a folder with its own owner and mode, or a link."""

MUST_EXIST: Final = b"must-exist"
"""The same, where a link of the layer's own leads: it is not made if it is not there."""

LINK: Final = b"link"
"""A hard link to a file of a layer below, whose path is the target of a symbolic link in its place."""

_NAME_LIMIT: Final = 255
_PATH_LIMIT: Final = 4096
_TARGET_LIMIT: Final = 4095
_DEPTH_LIMIT: Final = 2048
_LINKS_LIMIT: Final = 40
_STEPS_LIMIT: Final = 1024
"""From folder to folder below links, in one look-up."""
_REMEMBERED: Final = 10_000
_NODES_LIMIT: Final = 8_000_000
_KEPT_LIMIT: Final = 1 << 30
_NAME_COST: Final = 64
_XATTRS_LIMIT: Final = 0xFFFF
"""Of one, and of all of a file together, as other file systems have it."""
_CAPABILITY: Final = b"security.capability"
_ACLS: Final = (b"system.posix_acl_access", b"system.posix_acl_default")
_KEPT_XATTRS: Final = frozenset({_CAPABILITY, *_ACLS, OPAQUE})


def split(name: bytes) -> list[bytes]:
    """The parts of a member's name; InvalidArgument if it cannot be one."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        refuse(name, "has '..' in its name")
    if b"\0" in name:
        refuse(name, "has a NUL in its name")
    if len(name) > _PATH_LIMIT or any(len(part) > _NAME_LIMIT for part in parts):
        refuse(name, "cannot be made: its name is too long")
    return parts


class Tally:
    """What trees that are built together take in memory: entries, and bytes of names, targets, attributes and small files."""

    def __init__(self, entries: int = _NODES_LIMIT, kept: int = _KEPT_LIMIT) -> None:
        self._entries, self._kept = entries, kept
        self._entries_left, self._kept_left = entries, kept

    def add(self, entries: int, kept: int) -> None:
        """QuotaExceeded(cause="files") where they become too many."""
        self._entries_left -= entries
        self._kept_left -= kept
        if self._entries_left < 0 or self._kept_left < 0:
            raise QuotaExceeded(
                f"source: more than {self._entries} files, or {self._kept >> 20} MiB of what is kept with them in metadata",
                field="source",
                cause="files",
                ran="ran",
            )

    def add_tree(self, root: Node) -> None:
        """A whole tree that came from elsewhere."""
        folders = [root]
        while folders:
            children = folders.pop().children or {}
            self.add(len(children), sum(len(name) + _kept_bytes(node) for name, node in children.items()))
            folders += [node for node in children.values() if node.children is not None]


def _kept_bytes(node: Node) -> int:
    kept = len(node.target) + len(node.inline or b"")
    if node.xattrs:
        kept += sum(len(name) + len(value) for name, value in node.xattrs.items())
    return kept


class TreeBuilder:
    """Grows `root`. With `layered` the tree is that of a layer, and what it leaves to those below is marked with BELOW.

    `tally` is for all trees of a build.
    """

    def __init__(self, *, layered: bool = False, tally: Tally | None = None) -> None:
        self.root = folder()
        self._tally = tally if tally is not None else Tally()
        self._layered = layered
        self._found: dict[bytes, tuple[Node, int]] = {}
        self._hidden: list[list[bytes]] = []
        self._opaque: set[Node] = set()
        self._steps = 0
        if layered:
            self._imply(self.root, PARENT)

    # -- finding the place ---------------------------------------------------------------------------------------------------------------

    def _imply(self, node: Node, mark: bytes) -> Node:
        if self._layered:
            node.xattrs[BELOW] = mark
        return node

    def _parent(self, parts: list[bytes], name: bytes) -> tuple[Node, int]:
        """The folder of the last part and its depth; what is missing on the way is made, 0755 and 0:0."""
        if len(parts) == 1:
            return self.root, 0
        key = b"/".join(parts[:-1])
        if (found := self._found.get(key)) is None:
            stack = [self.root]
            self._descend(stack, parts[:-1], name, links=0, make=PARENT)
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            found = self._found[key] = stack[-1], len(stack) - 1
        return found

    def _descend(self, stack: list[Node], parts: Iterable[bytes], name: bytes, *, links: int, make: bytes) -> int:
        """Follow `parts` from the top of the stack; `make` b"": what is missing is refused. Returns how many links were followed."""
        if not links:
            self._steps = 0
        for part in parts:
            if links:
                self._steps += 1
                if self._steps > _STEPS_LIMIT:
                    refuse(name, "lies below links that lead too far about")
            if part == b"..":
                if len(stack) > 1:
                    stack.pop()
                continue
            children = stack[-1].children
            assert children is not None
            node = children.get(part)
            if node is None:
                if not make:
                    refuse(name, "lies below a link that leads nowhere")
                if len(part) > _NAME_LIMIT:
                    refuse(name, "cannot be made: its name is too long")
                self._grow(name, len(stack))
                node = children[part] = self._imply(folder(), make)
            if node.children is not None:
                stack.append(node)
            elif stat.S_ISLNK(node.mode) and BELOW not in node.xattrs:
                links += 1
                if links > _LINKS_LIMIT:
                    refuse(name, "lies below a link that leads nowhere")
                target = [part for part in node.target.split(b"/") if part not in (b"", b".")]
                if node.target.startswith(b"/"):
                    del stack[1:]
                links = self._descend(stack, target, name, links=links, make=MUST_EXIST if self._layered else b"")
            else:
                refuse(name, "lies below something that is no folder")
        return links

    def _grow(self, name: bytes, depth: int) -> None:
        self._tally.add(1, _NAME_COST)
        if depth > _DEPTH_LIMIT:
            refuse(name, "cannot be made: it lies too deep")

    def _find(self, parts: list[bytes], name: bytes) -> Node | None:
        """What is there, a link at the end not followed; None also for what cannot be reached."""
        if not parts:
            return self.root
        stack = [self.root]
        layered, self._layered = self._layered, False
        try:
            self._descend(stack, parts[:-1], name, links=0, make=b"")
        except InvalidArgument:
            return None
        finally:
            self._layered = layered
        assert stack[-1].children is not None
        return stack[-1].children.get(parts[-1])

    # -- entries -------------------------------------------------------------------------------------------------------------------------

    def put(self, name: bytes, node: Node) -> None:
        """Put a node in its place: a folder gives one that is there its owner, mode, time and xattrs; all else replaces what is there."""
        parts = split(name)
        _check_xattrs(name, node)
        self._tally.add(0, _kept_bytes(node))
        if stat.S_ISLNK(node.mode):
            if not node.target or b"\0" in node.target:
                refuse(name, "is a link to nothing")
            if len(node.target) > _TARGET_LIMIT:
                refuse(name, "cannot be made: its target is too long")
        if not parts:
            if node.children is None:
                refuse(name, "is the root, and no folder")
            self._dress(self.root, node)
            return
        parent, depth = self._parent(parts, name)
        assert parent.children is not None
        there = parent.children.get(parts[-1])
        if there is None:
            self._grow(name, depth + 1)
        elif there.children is not None and node.children is not None:
            self._dress(there, node)
            return
        elif there.children is not None or stat.S_ISLNK(there.mode):
            self._found.clear()
        if self._layered and there is not None and node.children is not None:
            self._opaque.add(node)  # what took the name first has hidden all that is below
        parent.children[parts[-1]] = node

    def _dress(self, there: Node, node: Node) -> None:
        there.mode, there.uid, there.gid, there.mtime_ns, there.xattrs = node.mode, node.uid, node.gid, node.mtime_ns, node.xattrs

    def put_hard_link(self, name: bytes, target: bytes) -> None:
        """Another name of a file that is in the tree; refused if it is not (and no layer below may have it), or is a folder."""
        parts = split(name)
        origin_parts = split(target)
        origin = self._find(origin_parts, target)
        if origin is None and not (self._layered and origin_parts):
            refuse(name, f"is a hard link to {target.decode(errors='replace')!r:.300}, which is not in the archive")
        if origin is not None and origin.children is not None:
            refuse(name, "is a hard link to a folder")
        if not parts:
            refuse(name, "is the root, and no folder")
        if origin is None:
            origin = Node(stat.S_IFLNK | 0o777, target=b"/".join(origin_parts), xattrs={BELOW: LINK})
            if len(origin.target) > _TARGET_LIMIT:
                refuse(name, "cannot be made: its target is too long")
            self._tally.add(0, len(origin.target))
        parent, depth = self._parent(parts, name)
        assert parent.children is not None
        there = parent.children.get(parts[-1])
        if there is None:
            self._grow(name, depth + 1)
        elif there.children is not None or stat.S_ISLNK(there.mode):
            self._found.clear()
        parent.children[parts[-1]] = origin

    def hide(self, name: bytes) -> None:
        """A whiteout, for the layers below alone: what this layer has of the name, before or after it, stays."""
        parts = split(name)
        if not parts:
            refuse(name, "would remove the root")
        self._hide(name, parts)

    def hide_all_in(self, name: bytes) -> None:
        """What the layers below have in the folder is not to be seen."""
        self._hide(name, [*split(name), b""])

    def _hide(self, name: bytes, parts: list[bytes]) -> None:
        self._tally.add(len(parts), len(name))
        if len(parts) > _DEPTH_LIMIT:
            refuse(name, "cannot be made: it lies too deep")
        self._hidden.append(parts)

    def finish(self) -> Node:
        """The tree; nothing may be put in it any more."""
        for parts in sorted(self._hidden, key=len):
            self._place_whiteout(parts)
        for node in self._opaque:
            node.xattrs[OPAQUE] = b"y"
        return self.root

    def _place_whiteout(self, parts: list[bytes]) -> None:
        """By its path alone: links of this layer are none to those below it, and what this layer has in the way hides all anyway."""
        place = self.root
        for part in parts[:-1]:
            children = place.children
            assert children is not None
            if (there := children.get(part)) is None:
                there = children[part] = self._imply(folder(), PARENT)
            if there.children is None or there in self._opaque:
                return
            place = there
        assert place.children is not None
        if not parts[-1]:
            self._opaque.add(place)
        elif (there := place.children.get(parts[-1])) is None:
            place.children[parts[-1]] = whiteout()
        elif there.children is not None:
            there.xattrs.pop(BELOW, None)  # what was there goes with its owner and mode
            self._opaque.add(there)


def _check_xattrs(name: bytes, node: Node) -> None:
    """Keep those that a sandbox sees or a layer needs. Overlayfs's other marks (redirect, metacopy) let a stranger compose paths."""
    if not node.xattrs:
        return
    kept = {key: value for key, value in node.xattrs.items() if key.startswith(b"user.") or key in _KEPT_XATTRS}
    size = 0
    for key, value in kept.items():
        size += len(key) + len(value)
        if not 5 < len(key) <= _NAME_LIMIT or b"\0" in key or size > _XATTRS_LIMIT or not _is_sane(key, value, node):
            _refuse_xattr(name, key)
    node.xattrs = kept


def _refuse_xattr(name: bytes, key: bytes) -> NoReturn:
    refuse(name, f"cannot be made: its attribute {key.decode(errors='replace')!r:.300} is none that a file system would take")


def _is_sane(key: bytes, value: bytes, node: Node) -> bool:
    """As the kernel checks what is set."""
    if key.startswith(b"user."):
        return stat.S_ISREG(node.mode) or stat.S_ISDIR(node.mode)
    if key == _CAPABILITY:
        return stat.S_ISREG(node.mode) and len(value) == {1: 12, 2: 20, 3: 24}.get(value[3] if len(value) > 3 else 0, -1)
    if key in _ACLS:
        version = struct.unpack_from("<I", value)[0] if len(value) >= 4 else 0
        return version == 2 and len(value) % 8 == 4 and not stat.S_ISLNK(node.mode)
    return stat.S_ISDIR(node.mode) and value == b"y"
