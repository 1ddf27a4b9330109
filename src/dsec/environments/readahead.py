"""How much the kernel reads ahead through a mount of ours, and through no other.

The kernel keeps the setting in a `bdi`. That of a mount made from plain files is named by a counter (`erofs-17`), which nothing links to
the mount; so it is recognised by having come into being while the mount was made. Where another mount of the kind was made in that moment,
two are new, and both are left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["BULK_KB", "reading_ahead"]

_BDIS: Final = Path("/sys/class/bdi")
BULK_KB: Final = 256
"""The least that a sequential read asks of a store at once. More would be read around every page fault as well."""


def _names(kind: str) -> set[str]:
    try:
        return {name for name in os.listdir(_BDIS) if name.startswith(kind + "-")}
    except OSError:
        return set()


@contextlib.contextmanager
def reading_ahead(kind: str, kilobytes: int = BULK_KB) -> Iterator[None]:
    """The mount of `kind` that is made in the block reads ahead by `kilobytes`, unless it already reads more."""
    before = _names(kind)
    yield
    new = _names(kind) - before
    if len(new) != 1:
        return
    setting = _BDIS / new.pop() / "read_ahead_kb"
    # without sysfs, or without the right to write to it, it is slower and no less correct
    with contextlib.suppress(OSError, ValueError):
        if int(setting.read_text()) < kilobytes:
            setting.write_text(str(kilobytes))
