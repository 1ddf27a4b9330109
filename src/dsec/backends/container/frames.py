"""Codec of the channel's frames (docs/channel.md). Pure: bytes in, frames out, no I/O.

A frame is the tuple (kind, stream, payload, offset); `offset` is the absolute position of a DATA frame and 0 for all others. What a
peer sends is checked here, so that all that leaves this module is well-formed; what is not raises `MalformedFrame`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from dsec.backends.container import wire
from libdsec.errors import DSecError

__all__ = [
    "FieldValue",
    "Fields",
    "Frame",
    "FrameDecoder",
    "MalformedFrame",
    "decode_number",
    "encode_data",
    "encode_fields",
    "encode_frame",
    "encode_number",
]

Frame = tuple[int, int, bytes, int]

_HEADER: Final = struct.Struct("<BBHI")
_DATA_HEADER: Final = struct.Struct("<BBHIQ")
_OFFSET: Final = struct.Struct("<Q")
_FIELD: Final = struct.Struct("<HHI")
_NUMBER_FIELD: Final = struct.Struct("<HHIq")
_NUMBER: Final = struct.Struct("<q")

FieldValue = int | str | bytes


class MalformedFrame(DSecError):
    """The peer sent bytes that are not the channel's. The connection is of no more use; what was asked on it may have run."""

    code = "internal"


def encode_fields(fields: Iterable[tuple[int, FieldValue]]) -> bytes:
    """A payload of fields in the order given. Text is UTF-8, with lone surrogates standing for undecodable file name bytes."""
    parts: list[bytes] = []
    for tag, value in fields:
        if isinstance(value, int):
            parts.append(_NUMBER_FIELD.pack(tag, 0, 8, value))
            continue
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        parts.append(_FIELD.pack(tag, 0, len(raw)))
        parts.append(raw)
    return b"".join(parts)


def encode_frame(kind: int, payload: bytes = b"", stream: int = 0) -> bytes:
    """One frame. Raises ValueError for a payload beyond the limit: the caller has to split or refuse it."""
    if len(payload) > wire.MAX_PAYLOAD:
        raise ValueError(f"payload of {len(payload)} bytes exceeds {wire.MAX_PAYLOAD}")
    return _HEADER.pack(wire.VERSION, kind, stream, len(payload)) + payload


def encode_data(stream: int, offset: int, data: bytes | memoryview) -> bytes:
    """A DATA frame of at most MAX_DATA bytes."""
    if len(data) > wire.MAX_DATA:
        raise ValueError(f"data of {len(data)} bytes exceeds {wire.MAX_DATA}")
    return b"".join((_DATA_HEADER.pack(wire.VERSION, wire.DATA, stream, len(data) + 8, offset), data))


def encode_number(kind: int, stream: int, number: int) -> bytes:
    """A frame whose payload is one unsigned number (CREDIT)."""
    return _DATA_HEADER.pack(wire.VERSION, kind, stream, 8, number)


def decode_number(payload: bytes) -> int:
    """The payload of CREDIT."""
    if len(payload) != 8:
        raise MalformedFrame(f"a number of {len(payload)} bytes, not 8")
    (number,) = _OFFSET.unpack(payload)
    return int(number)


class Fields:
    """The fields of one payload. A repeated tag keeps all its values, in order; `number` and `text` read the last one."""

    __slots__ = ("_values",)

    def __init__(self, payload: bytes) -> None:
        values: dict[int, list[bytes]] = {}
        position, end = 0, len(payload)
        unpack = _FIELD.unpack_from
        while position < end:
            if end - position < 8:
                raise MalformedFrame("a field header is cut off")
            tag, zero, length = unpack(payload, position)
            position += 8
            if zero != 0 or length > end - position:
                raise MalformedFrame(f"field {tag} of {length} bytes does not fit its payload")
            value = payload[position : position + length]
            position += length
            if tag in values:
                values[tag].append(value)
            else:
                values[tag] = [value]
        self._values = values

    def __contains__(self, tag: int) -> bool:
        return tag in self._values

    def raw(self, tag: int) -> bytes | None:
        values = self._values.get(tag)
        return values[-1] if values else None

    def all(self, tag: int) -> list[bytes]:
        return self._values.get(tag, [])

    def number(self, tag: int, default: int = 0) -> int:
        values = self._values.get(tag)
        if not values:
            return default
        if len(values[-1]) != 8:
            raise MalformedFrame(f"field {tag}: a number of {len(values[-1])} bytes, not 8")
        return int(_NUMBER.unpack(values[-1])[0])

    def text(self, tag: int, default: str = "") -> str:
        values = self._values.get(tag)
        return values[-1].decode("utf-8", "surrogateescape") if values else default


class FrameDecoder:
    """Cuts a byte stream into frames, however it was split. Each payload byte is copied once or, across reads, twice."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that `chunk` completes. Raises MalformedFrame; the frames before the bad one are lost with the connection."""
        buffer = self._buffer
        if not buffer:
            frames, used = _cut(chunk)
            if used < len(chunk):
                buffer += memoryview(chunk)[used:]
            return frames
        buffer += chunk
        frames, used = _cut(buffer)
        if used:
            del buffer[:used]
        return frames


def _cut(source: bytes | bytearray) -> tuple[list[Frame], int]:
    frames: list[Frame] = []
    position, end = 0, len(source)
    unpack = _HEADER.unpack_from
    with memoryview(source) as view:
        while end - position >= 8:
            version, kind, stream, length = unpack(source, position)
            if version != wire.VERSION or not 1 <= kind <= wire.LAST_KIND or stream > 2 or length > wire.MAX_PAYLOAD:
                raise MalformedFrame(f"bad frame header: version {version}, kind {kind}, stream {stream}, length {length}")
            start = position + 8
            stop = start + length
            if stop > end:
                break
            if kind == wire.DATA:
                if not 8 <= length <= wire.MAX_DATA + 8:
                    raise MalformedFrame(f"DATA of {length} bytes")
                (offset,) = _OFFSET.unpack_from(source, start)
                frames.append((kind, stream, bytes(view[start + 8 : stop]), offset))
            else:
                frames.append((kind, stream, bytes(view[start:stop]), 0))
            position = stop
    return frames, position
