"""Extended attributes behind an inode: a header of 12 bytes, then entries with an index for the name's prefix, from multiples of 4."""

from __future__ import annotations

import os
import struct
from typing import Final

from dsec.environments.trees.model import Node

__all__ = ["check_xattrs", "decode_xattrs", "encode_xattrs", "holds_xattr"]

_PREFIXES: Final = ((2, b"system.posix_acl_access"), (3, b"system.posix_acl_default"), (1, b"user."), (4, b"trusted."), (6, b"security."))
_INDEXES: Final = dict(_PREFIXES)
_HEADER: Final = 12
_SHARED_COUNT_AT: Final = 4
_ENTRY: Final = struct.Struct("<BBH")
_MAX_LENGTH: Final = _HEADER + 4 * 0xFFFE


def _split(name: bytes) -> tuple[int, bytes] | None:
    for index, prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            return (index, rest) if len(rest) <= 255 and (not rest if index in (2, 3) else rest and b"\0" not in rest) else None
    return None


def holds_xattr(name: bytes) -> bool:
    """Whether an image can hold an attribute of this name: `user.`, `trusted.`, `security.` and the two POSIX ACLs."""
    return _split(name) is not None


def check_xattrs(root: Node) -> None:
    """Raises ValueError, naming the path, if some file in the tree has attributes that the format has no room for."""
    waiting = [(b"", root)]
    while waiting:
        path, node = waiting.pop()
        if node.xattrs:
            try:
                encode_xattrs(node.xattrs)
            except ValueError as error:
                raise ValueError(f"{os.fsdecode(path) or '/'}: {error}") from None
        for name, child in (node.children or {}).items():
            if child.children is not None or child.xattrs:
                waiting.append((path + b"/" + name, child))


def encode_xattrs(xattrs: dict[bytes, bytes]) -> bytes:
    """What follows the inode; empty for none. Raises ValueError for a name or a size that the format has no room for."""
    if not xattrs:
        return b""
    pieces = [bytes(_HEADER)]
    length = _HEADER
    for name in sorted(xattrs):
        value = xattrs[name]
        found = _split(name)
        if found is None:
            raise ValueError(f"extended attribute {name!r}: EROFS holds user., trusted., security. and POSIX ACLs only")
        if len(value) > 0xFFFF:
            raise ValueError(f"extended attribute {name!r} of {len(value)} bytes: at most 65535 are allowed")
        index, rest = found
        entry = _ENTRY.pack(len(rest), index, len(value)) + rest + value
        entry += bytes(-len(entry) % 4)
        pieces.append(entry)
        length += len(entry)
    if length > _MAX_LENGTH:
        raise ValueError(f"extended attributes of {length} bytes: at most {_MAX_LENGTH} are allowed on one file")
    return b"".join(pieces)


def decode_xattrs(data: bytes) -> dict[bytes, bytes]:
    """The attributes in what follows an inode. Raises ValueError for what is damaged or shared by inodes (we write none)."""
    if not data:
        return {}
    if len(data) < _HEADER or data[_SHARED_COUNT_AT]:
        raise ValueError("shared or truncated extended attributes")
    xattrs: dict[bytes, bytes] = {}
    at = _HEADER
    while at < len(data):
        if at + _ENTRY.size > len(data):
            raise ValueError("an extended attribute reaches beyond its inode")
        name_length, index, value_length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        end = at + name_length + value_length
        prefix = _INDEXES.get(index)
        if prefix is None or end > len(data):
            raise ValueError("an extended attribute reaches beyond its inode or has an unknown prefix")
        name = prefix + data[at : at + name_length]
        if name in xattrs or _split(name) is None:
            raise ValueError(f"the extended attribute {name!r} cannot be or is there twice")
        xattrs[name] = data[at + name_length : end]
        at = end + (-end % 4)
    return xattrs
