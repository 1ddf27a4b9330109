"""Which contents the store's packs hold already: a cache on the node, made from the packs' indexes and never believed without them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dsec.environments.packs.index import PackIndex, data_name, read_index
from dsec.environments.trees.model import Pack

__all__ = ["ContentsLost", "KnownContents"]

_VERSION: Final = 1
_CANDIDATES: Final = 8
_SCHEMA: Final = """
CREATE TABLE packs (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, size INTEGER NOT NULL);
CREATE TABLE segments (
    digest BLOB NOT NULL, pack INTEGER NOT NULL, start INTEGER NOT NULL, PRIMARY KEY (digest, pack, start)
) WITHOUT ROWID;
CREATE INDEX segments_of ON segments (pack);
"""


class ContentsLost(Exception):
    """A pack that a build referred to has gone, or is not what was thought: the build is to run again, and will store what it needs."""


class KnownContents:
    """Segments of the packs in the folder `packs`, found by digest. Several processes may share the file at `path`.

    The file may be lost or damaged at any time: it is made anew, at worst contents are stored twice. Threads take turns.
    """

    def __init__(self, path: Path, packs: Path) -> None:
        self.folder = packs
        self._path = path
        self._lock = threading.Lock()
        self._packs: dict[int, Pack] = {}
        self._database: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._close()

    def refresh(self) -> None:
        """Take in packs that have come, drop those that have gone. OSError if the store cannot be read."""
        there = {f"sha256:{name.removesuffix('.index')}" for name in _listed(self.folder) if name.endswith(".index")}
        with self._lock:
            try:
                self._update(self._opened(), there)
            except sqlite3.DatabaseError:
                self._discard()
                with contextlib.suppress(sqlite3.DatabaseError):
                    self._update(self._opened(), there)

    def find(self, digest: bytes) -> list[tuple[Pack, int]]:
        """Packs that hold the segment with this digest, each with the block it begins at; the oldest first."""
        with self._lock:
            try:
                rows = self._opened().execute(
                    "SELECT pack, start FROM segments WHERE digest = ? ORDER BY pack, start LIMIT ?", (digest, _CANDIDATES)
                )
                return [(pack, start) for number, start in rows.fetchall() if (pack := self._pack(number)) is not None]
            except sqlite3.DatabaseError:
                self._discard()
                return []

    def forget(self) -> None:
        """What it says was found to be wrong: begin from nothing."""
        with self._lock:
            self._discard()

    # -- the file ------------------------------------------------------------------------------------------------------------------------

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            database = sqlite3.connect(self._path, timeout=30.0, isolation_level=None, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=NORMAL")
                database.execute("BEGIN IMMEDIATE")
                if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                    for table in ("packs", "segments"):
                        database.execute(f"DROP TABLE IF EXISTS {table}")
                    for statement in _SCHEMA.strip().split(";\n"):
                        database.execute(statement)
                    database.execute(f"PRAGMA user_version={_VERSION}")
                database.execute("COMMIT")
            except BaseException:
                database.close()
                raise
            self._database = database
        return self._database

    def _close(self) -> None:
        self._packs.clear()
        if self._database is not None:
            with contextlib.suppress(sqlite3.DatabaseError):
                self._database.close()
            self._database = None

    def _discard(self) -> None:
        """A process that has the old file open goes on with it."""
        self._close()
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _update(self, database: sqlite3.Connection, there: set[str]) -> None:
        known = {digest for (digest,) in database.execute("SELECT digest FROM packs")}
        for digest in known - there:
            database.execute("BEGIN IMMEDIATE")
            try:
                database.execute("DELETE FROM segments WHERE pack = (SELECT id FROM packs WHERE digest = ?)", (digest,))
                database.execute("DELETE FROM packs WHERE digest = ?", (digest,))
            finally:
                database.execute("COMMIT")
        for digest in sorted(there - known):
            # one that is being removed, or is damaged, is not worth referring to
            with contextlib.suppress(OSError, ValueError):
                index = read_index(self.folder, digest)
                if (self.folder / data_name(digest)).stat().st_size == index.size:
                    self._insert(database, index)

    def _insert(self, database: sqlite3.Connection, index: PackIndex) -> None:
        database.execute("BEGIN IMMEDIATE")
        try:
            database.execute("INSERT OR IGNORE INTO packs (digest, size) VALUES (?, ?)", (index.digest, index.size))
            [number] = database.execute("SELECT id FROM packs WHERE digest = ?", (index.digest,)).fetchone()
            rows = ((entry.digest, number, entry.start) for entry in index)
            database.executemany("INSERT OR IGNORE INTO segments (digest, pack, start) VALUES (?, ?, ?)", rows)
            database.execute("COMMIT")
        except BaseException:
            database.execute("ROLLBACK")
            raise

    def _pack(self, number: int) -> Pack | None:
        if (pack := self._packs.get(number)) is None:
            row = self._opened().execute("SELECT digest, size FROM packs WHERE id = ?", (number,)).fetchone()
            if row is None:
                return None
            pack = self._packs[number] = Pack(row[0], row[1])
        return pack


def _listed(folder: Path) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
