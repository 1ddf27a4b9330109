"""The packs of a store: `packs/<hex>.data` and `packs/<hex>.index`, placed by renames and never written again."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from dsec.environments.durable import sync_folder
from dsec.environments.manifest import PackUse
from dsec.environments.packs.index import data_name, index_name, read_index
from dsec.environments.packs.known import ContentsLost
from dsec.environments.trees.model import Pack

__all__ = ["PackShelf"]

_HEX: int = 64


class PackShelf:
    """Packs below `folder`. One is there when its index is: the data is placed before it and removed after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def data(self, digest: str) -> Path:
        """Where the pack's contents are."""
        return self.folder / data_name(digest)

    def index(self, digest: str) -> Path:
        """Where the pack's index is."""
        return self.folder / index_name(digest)

    def digests(self) -> set[str]:
        """Of all packs that are there."""
        return {f"sha256:{name[:_HEX]}" for name in os.listdir(self.folder) if len(name) == _HEX + 6 and name.endswith(".index")}

    def flaw(self, use: PackUse) -> str | None:
        """Whether the pack is there with as many bytes as it should have, and what is wrong if not. Reads no contents."""
        try:
            size = self.data(use.digest).stat().st_size
        except FileNotFoundError:
            return f"the pack {use.digest} is missing"
        if size != use.size:
            return f"the pack {use.digest} has {size} bytes instead of {use.size}"
        return None

    def place(self, folder: Path, pack: Pack, *, aside: Path) -> None:
        """Move a finished pack from `folder` (a leased one of this file system) here, durably, unless it is here and whole."""
        if (folder / index_name(pack.digest)).exists():
            with contextlib.suppress(OSError, ValueError):
                if read_index(self.folder, pack.digest).size == self.data(pack.digest).stat().st_size:
                    return
            self.set_aside(pack.digest, aside)
            (folder / data_name(pack.digest)).rename(self.data(pack.digest))
            (folder / index_name(pack.digest)).rename(self.index(pack.digest))
            sync_folder(self.folder)

    def require(self, use: PackUse, *, aside: Path) -> None:
        """See that a pack that is to be referred to is here, and make it young. ContentsLost if it is not, or not whole.

        One that is damaged is taken out of the way, so that the build that runs again stores its contents anew.
        """
        try:
            os.utime(self.index(use.digest))
        except FileNotFoundError:
            raise ContentsLost(f"the pack {use.digest} has been removed") from None
        if (flaw := self.flaw(use)) is not None:
            self.set_aside(use.digest, aside)
            raise ContentsLost(flaw)

    def set_aside(self, digest: str, aside: Path) -> None:
        """Take the pack away into the folder `aside` of the same file system: who has it open keeps it."""
        for path in (self.index(digest), self.data(digest)):
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside / f"{secrets.token_hex(4)}-{path.name}")
