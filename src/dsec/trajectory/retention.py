"""What the journal forgets: records of sandboxes that ended long ago, and the oldest ones while it is too large."""

from __future__ import annotations

import sqlite3

__all__ = ["prune"]

CHUNK = 20
"""Sandboxes dropped in one transaction, so that results do not wait long for theirs."""


def prune(db: sqlite3.Connection, before: float, limit_bytes: int) -> bool:
    """Drop one chunk; True if there is more to drop. Sandboxes that are not over keep all their records."""
    doomed = [row[0] for row in db.execute("SELECT sandbox_id FROM sandboxes WHERE over=1 AND ended_at<? LIMIT ?", (before, CHUNK))]
    if not doomed and _size(db) > limit_bytes:
        doomed = [row[0] for row in db.execute("SELECT sandbox_id FROM sandboxes WHERE over=1 ORDER BY ended_at LIMIT ?", (CHUNK,))]
    if not doomed:
        db.execute("DELETE FROM idempotency WHERE created_at<?", (before,))
        return False
    ids = [(sandbox_id,) for sandbox_id in doomed]
    db.execute("BEGIN IMMEDIATE")
    try:
        db.executemany("DELETE FROM ops WHERE sandbox_id=?", ids)
        db.executemany("DELETE FROM sessions WHERE sandbox_id=?", ids)
        db.executemany("DELETE FROM sandboxes WHERE sandbox_id=?", ids)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return True


def _size(db: sqlite3.Connection) -> int:
    """Bytes in use; pages that were freed are used again and do not count."""
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    return int((pages - free) * page_bytes)
