"""The messages of a process's stream: one binary WebSocket message each, its first byte the kind.

From the server: DATA (stream, offset, bytes), EOF (stream), RESULT (an ExecResult without output), ERROR (an error body), STDIN_CREDIT
(count). From the client: STDIN, STDIN_EOF, SIGNAL (a SignalRequest), RESIZE (rows, cols), CREDIT (stream, count). Numbers are little-
endian.

Credit goes both ways. The server sends no more output of a stream than the client has granted, beginning with the `credit` of the
request; the client sends no more standard input than the server has granted, beginning with STDIN_WINDOW. So a reader or a program that
takes its time stalls only itself.
"""

from __future__ import annotations

import struct
from typing import Final

from libdsec.errors import InvalidArgument

__all__ = [
    "CREDIT",
    "DATA",
    "DEFAULT_CREDIT",
    "EOF",
    "ERROR",
    "RESIZE",
    "RESULT",
    "SIGNAL",
    "STDIN",
    "STDIN_CREDIT",
    "STDIN_EOF",
    "STDIN_WINDOW",
    "decode_credit",
    "decode_data",
    "decode_resize",
    "encode_credit",
    "encode_data",
    "encode_resize",
    "encode_stdin_credit",
]

DATA: Final = 1
EOF: Final = 2
RESULT: Final = 3
ERROR: Final = 4
STDIN_CREDIT: Final = 5
STDIN: Final = 16
STDIN_EOF: Final = 17
SIGNAL: Final = 18
RESIZE: Final = 19
CREDIT: Final = 20

DEFAULT_CREDIT: Final = 4 << 20
"""Bytes of each of stdout and stderr that may be on their way at first."""
STDIN_WINDOW: Final = 1 << 20
"""Bytes of standard input that may be on their way at first."""

_DATA_HEADER = struct.Struct("<BBQ")
_CREDIT = struct.Struct("<BBQ")
_STDIN_CREDIT = struct.Struct("<BQ")
_RESIZE = struct.Struct("<BHH")


def encode_data(stream: int, offset: int, data: bytes) -> bytes:
    """A DATA message."""
    return _DATA_HEADER.pack(DATA, stream, offset) + data


def decode_data(message: bytes) -> tuple[int, int, bytes]:
    """(stream, offset, bytes) of a DATA message."""
    _, stream, offset = _DATA_HEADER.unpack_from(message)
    return stream, offset, message[_DATA_HEADER.size :]


def encode_credit(stream: int, count: int) -> bytes:
    """A CREDIT message."""
    return _CREDIT.pack(CREDIT, stream, count)


def decode_credit(message: bytes) -> tuple[int, int]:
    """(stream, count) of a CREDIT message, from whoever sent it: checked."""
    if len(message) != _CREDIT.size:
        raise InvalidArgument(f"a CREDIT message has {_CREDIT.size} bytes, not {len(message)}", field="credit")
    _, stream, count = _CREDIT.unpack(message)
    if stream not in (1, 2):
        raise InvalidArgument(f"there is no output stream {stream}", field="stream")
    return stream, count


def encode_stdin_credit(count: int) -> bytes:
    """A STDIN_CREDIT message."""
    return _STDIN_CREDIT.pack(STDIN_CREDIT, count)


def decode_stdin_credit(message: bytes) -> int:
    """The count of a STDIN_CREDIT message."""
    return int(_STDIN_CREDIT.unpack(message)[1])


def encode_resize(rows: int, cols: int) -> bytes:
    """A RESIZE message. Each of rows and cols fits 16 bits."""
    if not (0 < rows < 65536 and 0 < cols < 65536):
        raise InvalidArgument(f"a terminal of {rows} rows and {cols} columns cannot be; 1 to 65535 each", field="rows")
    return _RESIZE.pack(RESIZE, rows, cols)


def decode_resize(message: bytes) -> tuple[int, int]:
    """(rows, cols) of a RESIZE message, checked."""
    if len(message) != _RESIZE.size:
        raise InvalidArgument(f"a RESIZE message has {_RESIZE.size} bytes, not {len(message)}", field="rows")
    _, rows, cols = _RESIZE.unpack(message)
    if not rows or not cols:
        raise InvalidArgument("a terminal has at least one row and one column", field="rows")
    return rows, cols
