"""The Range header, as far as a single range of bytes."""

from __future__ import annotations

import re

from libdsec.errors import InvalidArgument

__all__ = ["parse_range"]

_RANGE = re.compile(r"bytes=([0-9]{0,40})-([0-9]{0,40})", re.IGNORECASE)
_OTHER = re.compile(r"(?!bytes=).*|bytes=[0-9, -]*,[0-9, -]*", re.IGNORECASE)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, end) with `end` exclusive, or None for the whole file.

    As HTTP allows, several ranges and units other than bytes are answered with the whole; a single range that is none is refused.
    """
    if header is None or _OTHER.fullmatch(header.strip()):
        return None
    found = _RANGE.fullmatch(header.replace(" ", ""))
    first, last = found.groups() if found is not None else ("", "")
    if not first + last or (first and last and int(last) < int(first)):
        raise InvalidArgument(f"range {header!r:.100} is not bytes=first-last, bytes=first- or bytes=-count", field="range")
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last) + 1, size) if first and last else size
    if start >= size and not (start == 0 and size == 0):
        raise InvalidArgument(
            f"the range begins at {start}, the file has {size} bytes", field="range", cause="range", details={"size": size}
        )
    if end <= start:
        return None
    return start, end
