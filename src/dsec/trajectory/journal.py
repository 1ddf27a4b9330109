"""The journal: SQLite in WAL mode, one writer thread, group commits. It survives kill -9 at any point.

What must be on record before the world changes (a sandbox about to be launched) is awaited by `flush`; what may lag (states, results,
which aether still holds) is committed a few milliseconds later, and callbacks run after the commit. With synchronous=NORMAL a commit is a
write to the page cache: it survives the death of the process, and a power cut takes the sandboxes anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from dsec.trajectory import rows
from dsec.trajectory.batch import ROW_BYTES, Batch
from dsec.trajectory.rows import KeyRow, OpRow, PackRow, SandboxRow, SessionRow
from dsec.trajectory.transaction import transaction
from libdsec.errors import Overloaded

__all__ = ["Journal"]

GROUP_SECONDS = 0.004
RETRY_SECONDS = 1.0
CHECKPOINT_BYTES = 8 << 20
WAL_LIMIT_BYTES = 512 << 20
"""Where checkpoints beside the writer could not keep up, the writer waits for a whole one."""
PENDING_LIMIT_BYTES = 256 << 20

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], None]


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in the journal's settings, usable from any one thread at a time."""
    db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False, cached_statements=64)
    db.execute("PRAGMA busy_timeout=30000")
    if read_only:
        db.execute("PRAGMA query_only=ON")
    else:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("PRAGMA temp_store=MEMORY")
    return db


def _migrated(db: sqlite3.Connection) -> str:
    """Make an older journal this version's, step by step; the schema that it has then."""
    while True:
        (found,) = db.execute("SELECT value FROM meta WHERE name='schema'").fetchone()
        if found not in rows.MIGRATIONS:
            return str(found)
        with transaction(db):
            for step in rows.MIGRATIONS[found]:
                db.execute(step)


class Journal:
    """Open it with `open`, in the event loop that uses it. All methods but `flush`, `flush_done`, `run` and `aclose` return at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batch = Batch()
        self._inbox: queue.SimpleQueue[Batch | Job | None] = queue.SimpleQueue()
        self._checkpoints: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._since_checkpoint = 0
        self._writing = threading.Lock()
        """Held by whoever uses the writing connection."""
        self._under_way = 0
        """Batches that the writer thread has, or is about to have: none may overtake them."""
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._unwritten_bytes = 0
        self._drained: asyncio.Event | None = None
        self._forgotten: set[tuple[str, str]] = set()
        """Operations that are forgotten, but in the file still."""
        self._growth: tuple[int, asyncio.Event] | None = None
        self._unwritten: Batch | None = None
        """What could not be written: the next batch takes it along, so that none overtakes it. Of whoever holds `_writing`."""
        self.grown_bytes = 0
        """Output written since `grown` last returned."""
        self.failure: Exception | None = None
        """Why the last commit failed; None after one that worked."""

    async def open(self) -> None:
        """Make or open the file and start the writer."""
        self._loop = asyncio.get_running_loop()
        self._writer, self._reader = await asyncio.to_thread(self._prepare)
        self._thread = threading.Thread(target=self._run, name="dsec-journal", daemon=True)
        self._thread.start()
        self._checkpointer = threading.Thread(target=self._checkpoint, name="dsec-checkpoint", daemon=True)
        self._checkpointer.start()

    def _prepare(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)
        writer = connect(self.path)
        writer.executescript(rows.SCHEMA)
        writer.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(rows.SCHEMA_VERSION),))
        found = _migrated(writer)
        if found != str(rows.SCHEMA_VERSION):
            writer.close()
            raise RuntimeError(f"{self.path} has journal schema {found}, this version of DSec reads {rows.SCHEMA_VERSION}")
        return writer, connect(self.path, read_only=True)

    async def aclose(self) -> None:
        """Commit what is pending and close."""
        await self.flush()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._checkpoints.put(False)
        await asyncio.to_thread(self._checkpointer.join)
        self._reader.close()
        self._writer.close()

    # -- writing

    def add_sandboxes(self, new: Iterable[SandboxRow]) -> None:
        """Rows of sandboxes that are about to be made; await `flush` before they are."""
        self._batch.new_sandboxes.extend(new)
        self._schedule()

    def set_status(self, sandbox_id: str, state: str, over: bool, ended_at: float | None, status: bytes) -> None:
        """The sandbox's status as of now."""
        self._batch.statuses[sandbox_id] = (state, int(over), ended_at, status)
        self._schedule()

    def put_op(self, row: OpRow, committed: Callable[[], None] | None = None) -> None:
        """An operation begins or ends; `committed` is called in the loop once the row is safe."""
        batch = self._batch
        batch.ops[row.sandbox_id, row.op_id] = row
        if self._forgotten:
            self._forgotten.discard((row.sandbox_id, row.op_id))
        if row.stdout is not None:
            size = len(row.stdout) + len(row.stderr or b"")
            batch.payload_bytes += size + ROW_BYTES
            self._unwritten_bytes += size + ROW_BYTES
        if committed is not None:
            batch.committed.append(committed)
        self._schedule()

    def forget_op(self, sandbox_id: str, op_id: str) -> None:
        """It was refused before it ran: the id is free again."""
        self._batch.ops.pop((sandbox_id, op_id), None)
        self._batch.deleted_ops.add((sandbox_id, op_id))
        self._forgotten.add((sandbox_id, op_id))
        self._schedule()

    def put_session(self, row: SessionRow) -> None:
        """A session opens or closes."""
        self._batch.sessions[row.sandbox_id, row.session_id] = row
        self._schedule()

    def put_key(self, row: KeyRow) -> None:
        """What a create with this idempotency key came to."""
        self._batch.keys[row.key] = row
        self._schedule()

    def forget_key(self, key: str) -> None:
        """The create was undone: the key is free again."""
        self._batch.keys.pop(key, None)
        self._batch.deleted_keys.add(key)
        self._schedule()

    def put_pack(self, row: PackRow) -> None:
        """A pack begins, goes on or ends."""
        self._batch.packs[row.op_id] = row
        self._schedule()

    def forget_pack(self, op_id: str) -> None:
        """Nothing came of it: the id is free again."""
        self._batch.packs.pop(op_id, None)
        self._batch.deleted_packs.add(op_id)
        self._schedule()

    async def flush(self) -> None:
        """Wait until all that was put so far is committed. Overloaded where the disk refuses it."""
        batch = self._batch
        if batch.waiters is None:
            batch.waiters = self._loop.create_future()
        if not self._soon:
            # At the end of this turn of the loop: others that are ready to write join the same commit.
            self._soon = True
            self._loop.call_soon(self._hand_over)
        await asyncio.shield(batch.waiters)

    async def flush_done(self) -> None:
        """As `flush`, for what has been done already and is only not safe from a crash: the error says that it ran."""
        try:
            await self.flush()
        except Overloaded as error:
            raise Overloaded(f"it is done, but {error.message}", cause=error.cause, ran="ran") from error

    @property
    def congested(self) -> bool:
        """More is unwritten than memory should hold."""
        return self._unwritten_bytes > PENDING_LIMIT_BYTES

    async def drain(self) -> None:
        """Wait while it is congested."""
        while self.congested:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    async def grown(self, size: int) -> None:
        """Wait until `size` bytes of output were written since this last returned. For one waiter."""
        event = asyncio.Event()
        if self.grown_bytes < size:
            self._growth = (size, event)
            await event.wait()
            self._growth = None
        self.grown_bytes = 0

    def _schedule(self) -> None:
        if self._timer is None and not self._soon:
            self._timer = self._loop.call_later(GROUP_SECONDS, self._hand_over)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._soon = False
        batch, self._batch = self._batch, Batch()
        if not self._written_at_once(batch):
            self._under_way += 1
            self._inbox.put(batch)

    def _written_at_once(self, batch: Batch) -> bool:
        """A few rows that somebody waits for are committed here where the writer has nothing else: some 50 us without a wait for the disk,
        less than it takes to wake a thread and be woken by it."""
        if batch.waiters is None or self._under_way or not batch.small or not self._writing.acquire(blocking=False):
            return False
        if self._unwritten is not None:
            self._writing.release()
            return False
        try:
            batch.write(self._writer)
        except Exception as error:
            self._unwritten = batch
            self._failed(batch, error)
        else:
            self._done(batch)
            self._since_checkpoint += batch.weight
        finally:
            self._writing.release()
        return True

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            with self._writing:
                self._take(item)

    def _take(self, item: Batch | Job) -> None:
        if not isinstance(item, Batch):
            item(self._writer)
            return
        if self._unwritten is not None:
            self._unwritten.put_back_under(item)
            self._unwritten = None
        try:
            item.write(self._writer)
        except Exception as error:
            self._unwritten = item
            self._report(self._came_back, self._failed, item, error)
        else:
            self._report(self._came_back, self._done, item)
            with contextlib.suppress(sqlite3.Error, OSError):
                self._ask_for_checkpoint(item)

    def _came_back(self, outcome: Callable[..., None], *args: object) -> None:
        self._under_way -= 1
        outcome(*args)

    def _ask_for_checkpoint(self, batch: Batch) -> None:
        self._since_checkpoint += batch.weight
        if self._since_checkpoint < CHECKPOINT_BYTES:
            return
        self._since_checkpoint = 0
        if os.path.getsize(f"{self.path}-wal") > WAL_LIMIT_BYTES:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            self._checkpoints.put(True)

    def _checkpoint(self) -> None:
        """A checkpoint waits for the disk; here no commit waits with it."""
        db = connect(self.path)
        try:
            while self._checkpoints.get():
                with contextlib.suppress(sqlite3.Error):
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            db.close()

    def _report(self, callback: Callable[..., None], *args: object) -> None:
        # The loop may be closed under us at an unclean exit; then nobody waits.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _done(self, batch: Batch) -> None:
        self.failure = None
        self._forgotten -= batch.deleted_ops - self._batch.deleted_ops
        self.grown_bytes += batch.payload_bytes
        if self._growth is not None and self.grown_bytes >= self._growth[0]:
            self._growth[1].set()
        self._unwritten_bytes -= batch.payload_bytes
        if self._drained is not None and not self.congested:
            self._drained.set()
            self._drained = None
        if batch.waiters is not None and not batch.waiters.done():
            batch.waiters.set_result(None)
        for callback in batch.committed:
            callback()

    def _failed(self, batch: Batch, error: Exception) -> None:
        self.failure = error
        if batch.waiters is not None and not batch.waiters.done():
            batch.waiters.set_exception(Overloaded(f"the journal cannot be written: {error}", cause="journal"))
            batch.waiters.exception()
        if self._timer is None and not self._soon:
            self._timer = self._loop.call_later(RETRY_SECONDS, self._hand_over)

    # -- reading; each takes some ten microseconds, the outputs apart

    def sandboxes(self, *, living: bool) -> list[SandboxRow]:
        """Those of which something may be left on the host; or the others, newest first, at most 1,000."""
        if living:
            return [SandboxRow(*row) for row in self._reader.execute("SELECT * FROM sandboxes WHERE over=0")]
        found = self._reader.execute("SELECT * FROM sandboxes WHERE over=1 ORDER BY ended_at DESC LIMIT 1000")
        return [SandboxRow(*row) for row in found]

    def sandbox(self, sandbox_id: str) -> SandboxRow | None:
        """One sandbox, or None."""
        row = self._reader.execute("SELECT * FROM sandboxes WHERE sandbox_id=?", (sandbox_id,)).fetchone()
        return None if row is None else SandboxRow(*row)

    def op(self, sandbox_id: str, op_id: str) -> OpRow | None:
        """One operation without its output, or None."""
        if (sandbox_id, op_id) in self._forgotten:
            return None
        row = self._reader.execute(f"SELECT {rows.OP_COLUMNS} FROM ops WHERE sandbox_id=? AND op_id=?", (sandbox_id, op_id)).fetchone()
        return None if row is None else OpRow(*row)

    def ops(self, sandbox_id: str, *, running_only: bool = False) -> list[OpRow]:
        """The sandbox's operations in their order, without output."""
        where = " AND state='running'" if running_only else ""
        found = self._reader.execute(f"SELECT {rows.OP_COLUMNS} FROM ops WHERE sandbox_id=?{where} ORDER BY seq", (sandbox_id,))
        return [OpRow(*row) for row in found]

    def last_op(self, sandbox_id: str) -> tuple[int, float]:
        """The highest order number that was given out, and when the last operation ended; 0 where there is none."""
        seq, ended_at = self._reader.execute("SELECT max(seq), max(ended_at) FROM ops WHERE sandbox_id=?", (sandbox_id,)).fetchone()
        return seq or 0, ended_at or 0.0

    def meta(self, name: str) -> str | None:
        """A fact about the journal or the host it was written on."""
        row = self._reader.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
        return None if row is None else str(row[0])

    async def set_meta(self, name: str, value: str) -> None:
        """Write such a fact."""

        def put(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value=excluded.value", (name, value))

        await self.run(put)

    def sessions(self, sandbox_id: str) -> list[SessionRow]:
        """The sandbox's shell sessions, open and closed."""
        found = self._reader.execute("SELECT * FROM sessions WHERE sandbox_id=? ORDER BY created_at", (sandbox_id,))
        return [SessionRow(*row) for row in found]

    def session(self, sandbox_id: str, session_id: str) -> SessionRow | None:
        """One shell session of the sandbox, or None."""
        if (pending := self._batch.sessions.get((sandbox_id, session_id))) is not None:
            return pending
        row = self._reader.execute("SELECT * FROM sessions WHERE sandbox_id=? AND session_id=?", (sandbox_id, session_id)).fetchone()
        return None if row is None else SessionRow(*row)

    def key(self, key: str) -> KeyRow | None:
        """What a create with this idempotency key came to, or None."""
        row = self._reader.execute("SELECT * FROM idempotency WHERE key=?", (key,)).fetchone()
        return None if row is None else KeyRow(*row)

    def pack(self, op_id: str) -> PackRow | None:
        """One pack, or None."""
        row = self._reader.execute("SELECT * FROM packs WHERE op_id=?", (op_id,)).fetchone()
        return None if row is None else PackRow(*row)

    def packs(self, *, under_way: bool = False) -> list[PackRow]:
        """All that are on record, or those that were under way when the record was made, the oldest first."""
        where = " WHERE state IN ('taking', 'packing')" if under_way else ""
        return [PackRow(*row) for row in self._reader.execute(f"SELECT * FROM packs{where} ORDER BY created_at")]

    async def output(self, sandbox_id: str, op_id: str) -> tuple[bytes, bytes] | None:
        """What was kept of stdout and stderr; None where it is not there (any more). Read in a thread: it may be hundreds of megabytes."""

        def read() -> tuple[bytes, bytes] | None:
            db = connect(self.path, read_only=True)
            try:
                row = db.execute("SELECT stdout, stderr FROM ops WHERE sandbox_id=? AND op_id=?", (sandbox_id, op_id)).fetchone()
            finally:
                db.close()
            return None if row is None or row[0] is None else (row[0], row[1] or b"")

        return await asyncio.to_thread(read)

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run `job` on the writer's connection in the writer's thread, between two commits."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work(db: sqlite3.Connection) -> None:
            try:
                result = job(db)
            except Exception as error:
                self._report(settle, None, error)
            else:
                self._report(settle, result, None)

        self._inbox.put(work)
        return await future
