"""The journal's rows and its SQL, apart from all I/O.

Specs, statuses, requests and results are MessagePack made by those who own the types: the journal orders, keeps and finds them, and
reads none.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SCHEMA", "KeyRow", "OpRow", "PackRow", "SandboxRow", "SessionRow"]

SCHEMA_VERSION = 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sandboxes (
    sandbox_id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    over INTEGER NOT NULL,      -- 1: ended and nothing of it is left on the host
    created_at REAL NOT NULL,
    ended_at REAL,
    spec BLOB NOT NULL,
    status BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sandboxes_living ON sandboxes (sandbox_id) WHERE over = 0;
CREATE INDEX IF NOT EXISTS sandboxes_ended ON sandboxes (ended_at) WHERE over = 1;
CREATE TABLE IF NOT EXISTS ops (
    sandbox_id TEXT NOT NULL,
    op_id TEXT NOT NULL,
    seq INTEGER NOT NULL,       -- the order of requests within the sandbox
    session_id TEXT,            -- of the shell it ran in; NULL: a session of its own
    state TEXT NOT NULL,        -- running, exited, lost
    background INTEGER NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL,
    request BLOB NOT NULL,
    result BLOB,
    stdout BLOB,                -- last: reading the other columns need not follow their overflow pages
    stderr BLOB,
    UNIQUE (sandbox_id, op_id)
);
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    state TEXT NOT NULL,        -- open, closed
    created_at REAL NOT NULL,
    request BLOB NOT NULL,
    PRIMARY KEY (sandbox_id, session_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS idempotency (
    key TEXT PRIMARY KEY,
    request BLOB NOT NULL,
    sandbox_ids BLOB NOT NULL,
    errors BLOB NOT NULL,
    created_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS packs (
    op_id TEXT PRIMARY KEY,
    sandbox_id TEXT NOT NULL,
    state TEXT NOT NULL,        -- taking, packing, published, failed
    created_at REAL NOT NULL,
    request BLOB NOT NULL,
    plan BLOB NOT NULL,         -- how to go on with it after a restart
    info BLOB NOT NULL
) WITHOUT ROWID;
"""

MIGRATIONS = {
    # A session's id is its sandbox's own.
    "1": (
        """
        CREATE TABLE sessions_2 (
            session_id TEXT NOT NULL,
            sandbox_id TEXT NOT NULL,
            state TEXT NOT NULL,
            created_at REAL NOT NULL,
            request BLOB NOT NULL,
            PRIMARY KEY (sandbox_id, session_id)
        ) WITHOUT ROWID
        """,
        "INSERT INTO sessions_2 SELECT session_id, sandbox_id, state, created_at, request FROM sessions",
        "DROP TABLE sessions",
        "ALTER TABLE sessions_2 RENAME TO sessions",
        "UPDATE meta SET value='2' WHERE name='schema'",
    )
}
"""By the version that a journal has: what makes it the next one, in one transaction."""


class SandboxRow(NamedTuple):
    """A sandbox; `spec` never changes, the rest does."""

    sandbox_id: str
    state: str
    over: int
    created_at: float
    ended_at: float | None
    spec: bytes
    status: bytes


class OpRow(NamedTuple):
    """An operation. `stdout` and `stderr` are None until it has ended, and in answers that do not need them."""

    sandbox_id: str
    op_id: str
    seq: int
    session_id: str | None
    state: str
    background: int
    started_at: float
    ended_at: float | None
    request: bytes
    result: bytes | None
    stdout: bytes | None = None
    stderr: bytes | None = None


class SessionRow(NamedTuple):
    """A shell session."""

    session_id: str
    sandbox_id: str
    state: str
    created_at: float
    request: bytes


class KeyRow(NamedTuple):
    """What a create with an idempotency key came to."""

    key: str
    request: bytes
    sandbox_ids: bytes
    errors: bytes
    created_at: float


class PackRow(NamedTuple):
    """A sandbox's disk that becomes, or became, a layer. Once it is `packing`, its snapshot is there until its state is another."""

    op_id: str
    sandbox_id: str
    state: str
    created_at: float
    request: bytes
    plan: bytes
    info: bytes


PUT_SANDBOX = (
    "INSERT INTO sandboxes (sandbox_id, state, over, created_at, ended_at, spec, status) VALUES (?,?,?,?,?,?,?) "
    "ON CONFLICT (sandbox_id) DO UPDATE SET state=excluded.state, over=excluded.over, ended_at=excluded.ended_at, status=excluded.status"
)
SET_STATUS = "UPDATE sandboxes SET state=?, over=?, ended_at=?, status=? WHERE sandbox_id=?"
PUT_OP = (
    "INSERT INTO ops (sandbox_id, op_id, seq, session_id, state, background, started_at, ended_at, request, result, stdout, stderr) "
    "VALUES (?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (sandbox_id, op_id) DO UPDATE SET state=excluded.state, started_at=excluded.started_at, "
    "ended_at=excluded.ended_at, result=excluded.result, stdout=excluded.stdout, stderr=excluded.stderr"
)
DELETE_OP = "DELETE FROM ops WHERE sandbox_id=? AND op_id=?"
PUT_SESSION = (
    "INSERT INTO sessions (session_id, sandbox_id, state, created_at, request) VALUES (?,?,?,?,?) "
    "ON CONFLICT (sandbox_id, session_id) DO UPDATE SET state=excluded.state"
)
PUT_KEY = (
    "INSERT INTO idempotency (key, request, sandbox_ids, errors, created_at) VALUES (?,?,?,?,?) "
    "ON CONFLICT (key) DO UPDATE SET sandbox_ids=excluded.sandbox_ids, errors=excluded.errors"
)
PUT_PACK = (
    "INSERT INTO packs (op_id, sandbox_id, state, created_at, request, plan, info) VALUES (?,?,?,?,?,?,?) "
    "ON CONFLICT (op_id) DO UPDATE SET state=excluded.state, plan=excluded.plan, info=excluded.info"
)
DELETE_PACK = "DELETE FROM packs WHERE op_id=?"
DELETE_KEY = "DELETE FROM idempotency WHERE key=?"
OP_COLUMNS = "sandbox_id, op_id, seq, session_id, state, background, started_at, ended_at, request, result"
