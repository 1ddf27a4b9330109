"""What the writer commits in one transaction: rows gathered by the event loop, the later version of a row in place of the earlier."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable

from dsec.trajectory import rows
from dsec.trajectory.rows import KeyRow, OpRow, PackRow, SandboxRow, SessionRow
from dsec.trajectory.transaction import transaction

__all__ = ["ROW_BYTES", "Batch"]

ROW_BYTES = 2048
"""What an operation costs in memory besides its output, about."""


class Batch:
    """Rows of one transaction. Filled by the event loop, then given to the writer thread, never touched by both at once."""

    __slots__ = (
        "committed",
        "deleted_keys",
        "deleted_ops",
        "deleted_packs",
        "keys",
        "new_sandboxes",
        "ops",
        "packs",
        "payload_bytes",
        "sessions",
        "statuses",
        "waiters",
    )

    def __init__(self) -> None:
        self.new_sandboxes: list[SandboxRow] = []
        self.statuses: dict[str, tuple[str, int, float | None, bytes]] = {}
        self.ops: dict[tuple[str, str], OpRow] = {}
        self.deleted_ops: set[tuple[str, str]] = set()
        self.sessions: dict[tuple[str, str], SessionRow] = {}
        self.keys: dict[str, KeyRow] = {}
        self.deleted_keys: set[str] = set()
        self.packs: dict[str, PackRow] = {}
        self.deleted_packs: set[str] = set()
        self.committed: list[Callable[[], None]] = []
        """Called in the event loop after the commit."""
        self.waiters: asyncio.Future[None] | None = None
        self.payload_bytes = 0

    @property
    def weight(self) -> int:
        """About as many bytes as it adds to the log."""
        return self.payload_bytes + ROW_BYTES * (len(self.new_sandboxes) + len(self.statuses) + len(self.ops))

    @property
    def small(self) -> bool:
        """Written in some ten microseconds."""
        return self.weight <= 8 * ROW_BYTES

    def write(self, db: sqlite3.Connection) -> None:
        """One transaction; on an error it is rolled back and the error raised."""
        with transaction(db):
            if self.deleted_ops:
                db.executemany(rows.DELETE_OP, list(self.deleted_ops))
            if self.new_sandboxes:
                db.executemany(rows.PUT_SANDBOX, self.new_sandboxes)
            if self.statuses:
                db.executemany(rows.SET_STATUS, [(*status, sandbox_id) for sandbox_id, status in self.statuses.items()])
            if self.ops:
                db.executemany(rows.PUT_OP, list(self.ops.values()))
            if self.sessions:
                db.executemany(rows.PUT_SESSION, list(self.sessions.values()))
            if self.deleted_keys:
                db.executemany(rows.DELETE_KEY, [(key,) for key in self.deleted_keys])
            if self.keys:
                db.executemany(rows.PUT_KEY, list(self.keys.values()))
            if self.deleted_packs:
                db.executemany(rows.DELETE_PACK, [(op_id,) for op_id in self.deleted_packs])
            if self.packs:
                db.executemany(rows.PUT_PACK, list(self.packs.values()))

    def put_back_under(self, newer: Batch) -> None:
        """Give what could not be written to `newer`, whose versions win. New sandboxes and keys stay out: their creators were told."""
        newer.statuses = {**self.statuses, **newer.statuses}
        kept = {key: row for key, row in self.ops.items() if key not in newer.deleted_ops}
        newer.ops = {**kept, **newer.ops}
        newer.deleted_ops |= self.deleted_ops
        newer.sessions = {**self.sessions, **newer.sessions}
        newer.deleted_keys |= self.deleted_keys - newer.keys.keys()
        newer.packs = {**{op_id: row for op_id, row in self.packs.items() if op_id not in newer.deleted_packs}, **newer.packs}
        newer.deleted_packs |= self.deleted_packs - newer.packs.keys()
        newer.committed = [*self.committed, *newer.committed]
        newer.payload_bytes += self.payload_bytes
