"""The Range header, as far as a single range of bytes."""

from __future__ import annotations

import re

from libdsec.errors import InvalidArgument

__all__ = ["parse_range"]

_RANGE = re.compile(r"^bytes=(\d{0,18})-(\d{0,18})$")


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, end) with `end` exclusive, or None for the whole file; several ranges are answered with the whole, as HTTP allows."""
    if header is None:
        return None
    found = _RANGE.match(header.replace(" ", ""))
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return max(0, size - int(last)), size
    start = int(first)
    end = min(int(last) + 1, size) if last else size
    if start >= size and not (start == 0 and size == 0):
        raise InvalidArgument(
            f"the range begins at {start}, the file has {size} bytes", field="range", cause="range", details={"size": size}
        )
    if end <= start:
        return None
    return start, end
