"""Tar archives into trees: owners, modes, times to the nanosecond, hard links, xattrs, devices and holes survive; nothing gets out."""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from typing import Final

from dsec.environments.streams import ByteReader, ForwardReader, damaged
from dsec.environments.tree import Attributes, RootedTree, refuse

__all__ = ["members", "unpack_member", "unpack_tar"]

_PIECE: Final = 1 << 18
_ID_LIMIT: Final = (1 << 32) - 2
_TIME_LIMIT: Final = 1 << 33
_XATTR, _XATTR_BASE64 = "SCHILY.xattr.", "LIBARCHIVE.xattr."
_UNTRUE: Final = (errno.ENAMETOOLONG, errno.EINVAL, errno.EOPNOTSUPP, errno.ERANGE, errno.E2BIG, errno.EPERM, errno.ENOTDIR, errno.ELOOP)
"""What a file system says to an entry that cannot be; a full disk and the like are not the archive's fault."""
_NODES: Final = {tarfile.CHRTYPE: stat.S_IFCHR, tarfile.BLKTYPE: stat.S_IFBLK, tarfile.FIFOTYPE: stat.S_IFIFO}


def members(reader: ForwardReader, *, need_end: bool = True) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The archive's members in order; of each, its data must be read before the next.

    tarfile takes a header that is cut off or garbled for the end. Here an archive without its end mark is refused, unless `need_end` is
    False and it ends just where a header would begin (some writers leave the mark out; the caller then has a digest to go by).
    """
    name = ""
    try:
        with tarfile.open(fileobj=reader, mode="r:", errors="surrogateescape") as archive:  # type: ignore[call-overload]
            while (member := archive.next()) is not None:
                archive.members.clear()  # else it keeps them all
                name = member.name
                yield archive, member
    except (tarfile.TarError, UnicodeError, ValueError, OverflowError) as error:
        raise damaged(f"{error} (after {name!r:.200})" if name else str(error)) from error
    whole = len(reader.last) == tarfile.BLOCKSIZE and not any(reader.last)
    if not whole and (need_end or reader.last):
        raise damaged(f"it is cut off or garbled after {name!r:.200}")


def _attributes_of(member: tarfile.TarInfo) -> Attributes:
    """What the header says of the entry, brought into what a file system can hold."""
    if not (0 <= member.uid <= _ID_LIMIT and 0 <= member.gid <= _ID_LIMIT):
        refuse(member.name, "has an owner that is no id")
    xattrs: dict[str, bytes] = {}
    for key, value in member.pax_headers.items():
        if key.startswith(_XATTR):
            xattrs[key.removeprefix(_XATTR)] = value.encode("utf-8", "surrogateescape")
        elif key.startswith(_XATTR_BASE64):
            try:
                xattrs.setdefault(key.removeprefix(_XATTR_BASE64), base64.b64decode(value + "=" * (-len(value) % 4)))
            except binascii.Error:
                refuse(member.name, f"has a garbled attribute {key}")
    return Attributes(mode=member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime_ns=_mtime_ns(member), xattrs=xattrs)


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """From the text where there is one: a float has no room for nanoseconds."""
    seconds, _, fraction = member.pax_headers.get("mtime", "").partition(".")
    if seconds.isdecimal() and (fraction.isdecimal() or not fraction):
        whole = min(int(seconds), _TIME_LIMIT)
        return whole * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
    return int(min(max(member.mtime, 0), _TIME_LIMIT)) * 1_000_000_000


def _pieces(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = archive.extractfile(member)
    if file is None:
        refuse(member.name, "has no content to read")
    left = member.size
    with contextlib.suppress(tarfile.ReadError):
        while left and (piece := file.read(min(left, _PIECE))):
            left -= len(piece)
            yield piece
    if left:
        raise damaged(f"it is cut off in {member.name!r:.200}")


def unpack_member(
    tree: RootedTree,
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    rename: Callable[[str], str],
    *,
    own: tuple[int, int] | None = None,
) -> None:
    """Put one member at `rename(its name)`, owned by `own` if given; InvalidArgument if it cannot be."""
    place = rename(member.name)
    try:
        if own is not None:
            member.uid, member.gid = own
        attributes = _attributes_of(member)
        if member.isdir():
            tree.add_folder(place, attributes)
        elif member.issym():
            tree.add_symlink(place, member.linkname, attributes)
        elif member.islnk():
            tree.add_hard_link(place, rename(member.linkname))
        elif member.isreg() or member.issparse():
            tree.add_file(place, _pieces(archive, member), attributes)
        elif member.type in _NODES:
            if not (0 <= member.devmajor < 1 << 12 and 0 <= member.devminor < 1 << 20):
                refuse(member.name, "has a device number that there is not")
            device = 0 if member.isfifo() else os.makedev(member.devmajor, member.devminor)
            tree.add_node(place, _NODES[member.type], device, attributes)
        else:
            refuse(member.name, f"is of an unknown type {member.type!r}")
    except OSError as error:
        if error.errno in _UNTRUE:
            refuse(member.name, f"cannot be made: {error}")
        raise
    except (OverflowError, ValueError, tarfile.TarError) as error:
        refuse(member.name, f"has numbers that cannot be: {error}")


def unpack_tar(
    stream: ByteReader, tree: RootedTree, destination: str, *, rename: Callable[[str], str] = str, own: tuple[int, int] | None = None
) -> str:
    """Unpack below `destination`, each name first passed through `rename`; returns the SHA-256 (hex) of the tar stream.

    `own`: the owner of everything, instead of what the archive says.
    """
    reader = ForwardReader(stream)
    prefix = destination.strip("/")

    def place(name: str) -> str:
        return f"{prefix}/{rename(name)}"

    for archive, member in members(reader):
        unpack_member(tree, archive, member, place, own=own)
    return reader.drain()
