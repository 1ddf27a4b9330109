"""The edge's clock: Unix seconds that never jump. A step of the host's wall clock must not end, or spare, three thousand sandboxes."""

from __future__ import annotations

import time

__all__ = ["now"]

_OFFSET = time.time() - time.monotonic()


def now() -> float:
    """Wall time as it was when the process started, moved on by the monotonic clock."""
    return time.monotonic() + _OFFSET
