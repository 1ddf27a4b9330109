"""Marks on what a collection of garbage found unused. Whoever comes to refer to a thing takes its mark away, and so keeps it.

condemned/<hex>.<kind>      since its time of change
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, Literal, get_args

__all__ = ["Condemned", "Thing"]

Thing = Literal["layer", "pack", "import", "trace"]
_THINGS: Final[dict[str, Thing]] = {thing: thing for thing in get_args(Thing)}


class Condemned:
    """The marks in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def any(self) -> bool:
        """Whether there is a mark at all; on a store that was never prepared there is none."""
        try:
            with os.scandir(self._folder) as entries:
                return next(entries, None) is not None
        except FileNotFoundError:
            return False

    def mark(self, kind: Thing, digest: str) -> None:
        """From now on it is known to be unused."""
        os.close(os.open(self._path(kind, digest), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def pardon(self, kind: Thing, digest: str) -> None:
        """It is used, or is no more. Nothing is written where there is no mark: that may be all that this node may do there."""
        if self.since(kind, digest) is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path(kind, digest).unlink()

    def since(self, kind: Thing, digest: str) -> float | None:
        """The store's time at which it was marked, None if it is not marked."""
        try:
            return self._path(kind, digest).stat().st_mtime
        except FileNotFoundError:
            return None

    def all(self) -> dict[tuple[Thing, str], float]:
        """All marks (kind, digest), and since when they are there."""
        found: dict[tuple[Thing, str], float] = {}
        for name in os.listdir(self._folder):
            stem, _, kind = name.partition(".")
            with contextlib.suppress(FileNotFoundError, KeyError):
                found[_THINGS[kind], f"sha256:{stem}"] = (self._folder / name).stat().st_mtime
        return found

    def _path(self, kind: Thing, digest: str) -> Path:
        return self._folder / f"{digest.removeprefix('sha256:')}.{kind}"
