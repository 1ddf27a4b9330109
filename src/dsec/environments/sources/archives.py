"""Tar archives into trees, in one pass: owners, modes, times to the nanosecond, hard links, xattrs, devices and holes survive."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Final

from dsec.environments.sources.builder import Tally, TreeBuilder
from dsec.environments.sources.bytestreams import Chunked
from dsec.environments.sources.refusals import damaged, refuse
from dsec.environments.sources.streams import Stream
from dsec.environments.sources.tar import HARD_LINK, Member, TarReader
from dsec.environments.trees import AddContent, Node
from libdsec.errors import QuotaExceeded

__all__ = ["Budget", "read_layer", "read_tar"]

_ID_LIMIT: Final = (1 << 32) - 2
_TIME_LIMIT: Final = (1 << 33) * 1_000_000_000
_TRAILER_LIMIT: Final = 64 << 20
_HOLE_SHARE: Final = 20
"""Of a hole a byte for each megabyte is charged: it is listed, if at length."""

_OPAQUE: Final = b".wh..wh..opq"
_WHITEOUT: Final = b".wh."
_AUFS: Final = b".wh..wh."


class Budget:
    """How many bytes files may hold in all; QuotaExceeded past it. Holes cost next to nothing. `tally` is for what is kept in memory."""

    def __init__(self, limit: int) -> None:
        self.tally = Tally()
        self._left = limit

    def spend(self, count: int) -> None:
        """Before they are read."""
        self._left -= count
        if self._left < 0:
            raise QuotaExceeded("source: the archive's files take more than the disk has", field="source", cause="disk", ran="ran")


def read_tar(
    stream: Stream,
    builder: TreeBuilder,
    add: AddContent,
    budget: Budget,
    *,
    rename: Callable[[bytes], bytes] = bytes,
    own: tuple[int, int] | None = None,
) -> str:
    """Put all members in `builder`, each name first passed through `rename`; returns the SHA-256 (hex) of the tar stream.

    `own`: the owner of everything, instead of what the archive says.
    """
    reader = TarReader(Chunked(stream))
    for member in reader:
        if own is not None:
            member.uid, member.gid = own
        if member.kind == HARD_LINK:
            builder.put_hard_link(rename(member.name), rename(member.link))
        else:
            builder.put(rename(member.name), _node(member, reader, add, budget))
    return _drain(stream)


def read_layer(stream: Stream, add: AddContent, budget: Budget) -> tuple[Node, str]:
    """The tree of an image's layer, with whiteouts and opaque folders, and the SHA-256 (hex) of the tar stream.

    What the layer leaves to those below it is marked with `BELOW`.
    """
    builder = TreeBuilder(layered=True, tally=budget.tally)
    reader = TarReader(Chunked(stream), need_end=False)
    for member in reader:
        name = member.name
        if _WHITEOUT in name:
            folder, _, leaf = name.rstrip(b"/").rpartition(b"/")
            if leaf == _OPAQUE:
                builder.hide_all_in(folder)
                continue
            if leaf.startswith(_AUFS) or folder.startswith(_AUFS) or b"/" + _AUFS in folder:
                continue
            if leaf.startswith(_WHITEOUT):
                hidden = leaf.removeprefix(_WHITEOUT)
                if hidden in (b"", b".", b".."):
                    raise damaged(f"the whiteout {os.fsdecode(name)!r:.200} hides nothing")
                builder.hide(folder + b"/" + hidden)
                continue
        if member.kind == HARD_LINK:
            builder.put_hard_link(name, member.link)
        else:
            builder.put(name, _node(member, reader, add, budget))
    digest = _drain(stream)
    return builder.finish(), digest


def _node(member: Member, reader: TarReader, add: AddContent, budget: Budget) -> Node:
    """What the headers say of the entry, if a file system can hold it; a file's content is taken in."""
    if not (0 <= member.uid <= _ID_LIMIT and 0 <= member.gid <= _ID_LIMIT):
        refuse(member.name, "has an owner that is no id")
    mtime = min(max(member.mtime_ns, 0), _TIME_LIMIT)
    kind = member.kind
    node = Node(kind | member.mode, member.uid, member.gid, mtime, member.xattrs)
    if kind == stat.S_IFREG:
        budget.spend(member.stored + (member.size >> _HOLE_SHARE))
        node.size, node.inline, node.segments = add(reader.content(member), member.size)
    elif kind == stat.S_IFDIR:
        node.children = {}
    elif kind == stat.S_IFLNK:
        node.mode, node.target = kind | 0o777, member.link
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        if not (0 <= member.major < 1 << 12 and 0 <= member.minor < 1 << 20):
            refuse(member.name, "has a device number that there is not")
        node.rdev = os.makedev(member.major, member.minor)
    return node


def _drain(stream: Stream) -> str:
    """Read what comes after the end."""
    trailer = 0
    for chunk in stream:
        trailer += len(chunk)
        if trailer > _TRAILER_LIMIT:
            raise damaged("too much comes after its end")
    return stream.sha256
