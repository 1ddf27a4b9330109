"""What the journal forgets: records of sandboxes that ended long ago, and the oldest ones while it is too large."""

from __future__ import annotations

import sqlite3

from dsec.trajectory.transaction import transaction

__all__ = ["prune"]

CHUNK = 20
"""Sandboxes dropped in one transaction, so that results do not wait long for theirs."""
OUTPUT_CHUNK = 100


def prune(db: sqlite3.Connection, before: float, limit_bytes: int) -> bool:
    """Drop one chunk; True if there is more to drop.

    Sandboxes that are not over keep their records, but not their output for ever: where that alone is too much, the oldest goes.
    """
    too_large = _size(db) > limit_bytes
    doomed = [row[0] for row in db.execute("SELECT sandbox_id FROM sandboxes WHERE over=1 AND ended_at<? LIMIT ?", (before, CHUNK))]
    if not doomed and too_large:
        doomed = [row[0] for row in db.execute("SELECT sandbox_id FROM sandboxes WHERE over=1 ORDER BY ended_at LIMIT ?", (CHUNK,))]
    if doomed:
        _drop_sandboxes(db, doomed)
        return True
    db.execute("DELETE FROM idempotency WHERE created_at<?", (before,))
    db.execute("DELETE FROM packs WHERE created_at<? AND state IN ('published', 'failed')", (before,))
    return too_large and _drop_output(db)


def _drop_sandboxes(db: sqlite3.Connection, doomed: list[str]) -> None:
    ids = [(sandbox_id,) for sandbox_id in doomed]
    with transaction(db):
        db.executemany("DELETE FROM ops WHERE sandbox_id=?", ids)
        db.executemany("DELETE FROM sessions WHERE sandbox_id=?", ids)
        db.executemany("DELETE FROM sandboxes WHERE sandbox_id=?", ids)


def _drop_output(db: sqlite3.Connection) -> bool:
    """Of the operations that ended first; a guest that writes without end must not fill the host's disk."""
    dropped = db.execute(
        "UPDATE ops SET stdout=NULL, stderr=NULL WHERE rowid IN "
        "(SELECT rowid FROM ops WHERE stdout IS NOT NULL AND length(stdout) + length(stderr) > 0 ORDER BY rowid LIMIT ?)",
        (OUTPUT_CHUNK,),
    )
    return dropped.rowcount > 0


def _size(db: sqlite3.Connection) -> int:
    """Bytes in use; pages that were freed are used again and do not count."""
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    return int((pages - free) * page_bytes)
