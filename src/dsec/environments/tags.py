"""Names of layers, and what they meant before.

tags/<name, '/' as '%'>/<tag>      a line for each digest that the tag has meant, with the time since when; the newest last
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.environments.durable import sync_folder, write_durably
from dsec.environments.leases import LeasedFolders
from dsec.environments.names import DEFAULT_TAG, Reference, check_digest
from libdsec.errors import DSecError, NotFound, SandboxFailed

__all__ = ["DamagedTag", "TagEntry", "Tags"]

_HISTORY: Final = 256
"""Lines that a tag keeps."""


class DamagedTag(SandboxFailed):
    """What a tag's file holds cannot be what was written there."""


@dataclass(frozen=True, slots=True)
class TagEntry:
    """What a tag meant from `since` (wall time; 0 where it is not known) on."""

    digest: str
    since: float


class Tags:
    """Tags below `root`. What another process does to them is seen at once; changes are made one at a time, under the lock at `lock`."""

    def __init__(self, root: Path, lock: Path, aside: LeasedFolders) -> None:
        self.root = root
        self._lock_path = lock
        self._aside = aside

    def history(self, reference: Reference, *, field: str = "environment") -> list[TagEntry]:
        """All that the tag has meant, the oldest first, at least one.

        NotFound if there is no such tag; DamagedTag if its file is damaged.
        """
        return [_parse(line, str(reference), field) for line in self._lines(reference, field)]

    def current(self, reference: Reference, *, field: str = "environment") -> str:
        """The digest that the tag means now. Fails as `history` does."""
        return _parse(self._lines(reference, field)[-1], str(reference), field).digest

    def _lines(self, reference: Reference, field: str) -> list[str]:
        try:
            lines = self._file(reference).read_text(errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{field}: no environment named {reference.name!r} with tag {reference.tag!r}", field=field) from None
        if not lines:
            raise _damaged(str(reference), field, "it is empty")
        return lines

    def put(self, reference: Reference, digest: str) -> None:
        """Let the tag mean `digest` from now on."""
        folder = self._file(reference).parent
        with self._alone(), self._aside.lease() as aside:
            known: list[TagEntry] = []
            with contextlib.suppress(DSecError):  # garbage is replaced
                known = self.history(reference)
            if known and known[-1].digest == digest:
                return
            lines = [f"{entry.digest} {entry.since:.3f}" for entry in known[1 - _HISTORY :]] + [f"{digest} {time.time():.3f}"]
            folder.mkdir(exist_ok=True, mode=0o700)
            write_durably(self._file(reference), "\n".join([*lines, ""]).encode(), aside=aside)
        sync_folder(self.root)

    def remove(self, reference: Reference, *, expected: str | None = None) -> bool:
        """Forget the tag with its history. False if it was not there (any more), or means another layer than `expected`."""
        with self._alone():
            try:
                if expected is not None and self.current(reference) != expected:
                    return False
            except NotFound:
                return False
            try:
                self._file(reference).unlink()
            except (FileNotFoundError, NotADirectoryError):
                return False
            with contextlib.suppress(OSError):
                self._file(reference).parent.rmdir()
        return True

    def names(self) -> Iterator[Reference]:
        """All tags, in order. OSError if the store cannot be read."""
        for folder in sorted(self.root.iterdir()):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for file in sorted(os.listdir(folder)):
                    yield Reference(folder.name.replace("%", "/"), tag=file)

    def all(self) -> Iterator[tuple[Reference, str]]:
        """All tags and what they mean now, in order. Those that vanish meanwhile, or are garbage, are left out."""
        with contextlib.suppress(FileNotFoundError):
            for reference in self.names():
                with contextlib.suppress(DSecError):
                    yield reference, self.current(reference)

    def _file(self, reference: Reference) -> Path:
        return self.root / reference.name.replace("/", "%") / (reference.tag or DEFAULT_TAG)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _parse(line: str, name: str, field: str) -> TagEntry:
    digest, _, since = line.partition(" ")
    try:
        return TagEntry(check_digest(digest, field=field), float(since or 0))
    except (DSecError, ValueError):
        raise _damaged(name, field, f"{line!r:.100}") from None


def _damaged(name: str, field: str, why: str) -> DamagedTag:
    return DamagedTag(f"{field}: the tag {name} is damaged: {why}", field=field, cause="store-lost", ran="not-run")
