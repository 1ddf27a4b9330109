"""How a source is refused: as a whole, or for one of its members. Nothing of it is kept then."""

from __future__ import annotations

import os
from typing import NoReturn

from libdsec.errors import InvalidArgument

__all__ = ["damaged", "refuse"]


def damaged(why: str) -> InvalidArgument:
    """The error for an archive as a whole."""
    return InvalidArgument(f"source: the archive is damaged: {why}", field="source", cause="archive")


def refuse(name: bytes, why: str) -> NoReturn:
    """Refuse an archive for one of its members."""
    raise InvalidArgument(f"source: the archive's member {os.fsdecode(name)!r:.300} {why}", field="source", cause="archive")
