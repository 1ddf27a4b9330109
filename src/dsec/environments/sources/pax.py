"""pax extended headers: records of `LENGTH KEY=VALUE\\n`, and what they say of the member that they stand before."""

from __future__ import annotations

import base64
import binascii
import os
from typing import TYPE_CHECKING, Final

from dsec.environments.sources.refusals import damaged, refuse

if TYPE_CHECKING:
    from dsec.environments.sources.tar import Member

__all__ = ["apply_records", "decimal", "merge_records", "parse_records"]

_XATTR: Final = b"SCHILY.xattr."
_XATTR_BASE64: Final = b"LIBARCHIVE.xattr."
_OFFSET: Final = b"GNU.sparse.offset"
_LENGTH: Final = b"GNU.sparse.numbytes"
_NUMBER_DIGITS: Final = 20
_RUNS_LIMIT: Final = 1 << 18
_RECORDS_LIMIT: Final = 1 << 15
"""Of a few bytes each they take far more memory than the header that they are in."""


def parse_records(data: bytes, sparse: list[tuple[int, int]]) -> dict[bytes, bytes]:
    """The records by key; of those that come again the last counts, but for the stretches of a sparse file, which go to `sparse`."""
    records: dict[bytes, bytes] = {}
    position, end = 0, len(data)
    offset = -1
    while position < end and data[position]:  # some writers pad with NULs
        space = data.find(b" ", position, position + _NUMBER_DIGITS)
        length = decimal(data[position:space], "a length") if space > 0 else 0
        stop = position + length
        if length == 0 or stop > end or data[stop - 1] != 0x0A:
            raise damaged("a pax record is garbled")
        key, equals, value = data[space + 1 : stop - 1].partition(b"=")
        if not equals or not key:
            raise damaged("a pax record is garbled")
        if key == _OFFSET:
            offset = decimal(value, "a hole")
        elif key == _LENGTH:
            sparse.append((offset, decimal(value, "a hole")))
        else:
            records[key] = value
        if len(records) > _RECORDS_LIMIT or len(sparse) > _RUNS_LIMIT:
            raise damaged("a pax header has too many records")
        position = stop
    return records


def merge_records(known: dict[bytes, bytes], more: dict[bytes, bytes]) -> None:
    """What a further header says is added to `known`. InvalidArgument if together they are too many."""
    known |= more
    if len(known) > _RECORDS_LIMIT:
        raise damaged("pax headers have too many records")


def apply_records(member: Member, records: dict[bytes, bytes]) -> None:
    """What is not about the size: names, owner, time, xattrs. An empty value takes a record back."""
    for key, value in records.items():
        if key == b"mtime":
            member.mtime_ns = _nanoseconds(value, member.mtime_ns)
        elif key == b"path":
            member.name = value or member.name
        elif key == b"linkpath":
            member.link = value or member.link
        elif key == b"uid":
            member.uid = decimal(value, "an owner") if value else member.uid
        elif key == b"gid":
            member.gid = decimal(value, "a group") if value else member.gid
        elif key.startswith(_XATTR):
            member.xattrs[key[len(_XATTR) :]] = value
        elif key.startswith(_XATTR_BASE64):
            try:
                decoded = base64.b64decode(value + b"=" * (-len(value) % 4))
            except binascii.Error:
                refuse(member.name, f"has a garbled attribute {os.fsdecode(key)}")
            member.xattrs.setdefault(key[len(_XATTR_BASE64) :], decoded)


def decimal(text: bytes, what: str) -> int:
    """A number that is not negative, of as many digits as 64 bits need."""
    if not text.isdigit() or len(text) > _NUMBER_DIGITS:
        raise damaged(f"{what} is garbled")
    return int(text)


def _nanoseconds(text: bytes, otherwise: int) -> int:
    """A time as text has room for them; one before 1970 becomes 1970 (as the header's own time does)."""
    if not text:
        return otherwise
    negative = text.startswith(b"-")
    seconds, _, fraction = text.removeprefix(b"-").partition(b".")
    if not seconds.isdigit() or not (fraction.isdigit() or not fraction):
        raise damaged("a time is garbled")
    return 0 if negative else min(int(seconds[:_NUMBER_DIGITS]), 1 << 40) * 1_000_000_000 + int(fraction[:9].ljust(9, b"0"))
