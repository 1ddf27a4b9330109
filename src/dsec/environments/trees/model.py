"""A tree of files in memory, without the files' bytes: those lie in packs and are referred to by block.

Names, link targets and xattr names are bytes, as the kernel has them. Two names of one file (hard links) are one `Node` in two places.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import Final

__all__ = ["BLOCK", "OPAQUE", "REDIRECT", "Node", "Pack", "Segment", "folder", "is_whiteout", "whiteout"]

BLOCK: Final = 4096

OPAQUE: Final = b"trusted.overlay.opaque"
"""Overlayfs's mark of a folder that hides all that lies below it in lower layers; its value is `y`."""

REDIRECT: Final = b"trusted.overlay.redirect"
"""Overlayfs's mark of a renamed folder: the path (from the root with a leading slash, else a sibling's name) that it goes on from below."""


@dataclass(slots=True, eq=False)
class Pack:
    """A file of file contents, each from a block's beginning. One that is still being written has no digest yet."""

    digest: str = ""
    """`sha256:<hex>` of its index (see `dsec.environments.packs.index`)."""
    size: int = 0
    """Bytes, a multiple of BLOCK."""


@dataclass(slots=True, frozen=True)
class Segment:
    """`count` blocks of a file, from its block `at`, lie in `pack` from block `start`. The last block of a file is padded with zeros."""

    at: int
    count: int
    pack: Pack
    start: int


@dataclass(slots=True, eq=False)
class Node:
    """One inode. `mode` is all of st_mode; what does not belong to its type stays at its default."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    rdev: int = 0
    target: bytes = b""
    size: int = 0
    inline: bytes | None = None
    """The whole content of a small file, which then has no segments."""
    segments: tuple[Segment, ...] = ()
    """In the order of `at`, not overlapping; what no segment covers is a hole."""
    children: dict[bytes, Node] | None = None
    """Of a folder, else None."""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


def folder(mode: int = 0o755, *, uid: int = 0, gid: int = 0, mtime_ns: int = 0) -> Node:
    """An empty folder."""
    return Node(stat.S_IFDIR | mode, uid, gid, mtime_ns, children={})


def whiteout() -> Node:
    """What hides a name of the layers below: a character device 0:0."""
    return Node(stat.S_IFCHR)


def is_whiteout(node: Node) -> bool:
    """Whether it hides a name of the layers below."""
    return stat.S_ISCHR(node.mode) and node.rdev == 0
