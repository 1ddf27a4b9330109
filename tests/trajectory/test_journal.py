"""The journal: what is committed when, what survives a kill, what is forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from dsec.trajectory import Journal, OpRow, PackRow, SandboxRow, SessionRow
from dsec.trajectory.batch import Batch
from dsec.trajectory.retention import prune
from dsec.trajectory.rows import KeyRow
from libdsec.errors import Overloaded


def sandbox(name: str = "sb-1", state: str = "running", over: int = 0, ended_at: float | None = None) -> SandboxRow:
    return SandboxRow(name, state, over, 1.0, ended_at, b"spec", b"status")


def op(op_id: str, seq: int = 1, state: str = "running", stdout: bytes | None = None, sandbox_id: str = "sb-1") -> OpRow:
    result = None if stdout is None else b"result"
    return OpRow(sandbox_id, op_id, seq, None, state, 0, 1.0, None, b"request", result, stdout, None if stdout is None else b"err")


async def until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.001)


@pytest.fixture
async def journal(tmp_path):
    journal = Journal(tmp_path / "edge.db")
    await journal.open()
    yield journal
    await journal.aclose()


async def test_what_was_put_is_there_after_a_flush(journal):
    journal.add_sandboxes([sandbox("sb-1"), sandbox("sb-2")])
    journal.put_op(op("a", 1))
    journal.put_session(SessionRow("ss-1", "sb-1", "open", 1.0, b"r"))
    journal.put_key(KeyRow("k", b"request", b"ids", b"errors", 1.0))
    assert journal.sandbox("sb-1") is None
    await journal.flush()
    assert {row.sandbox_id for row in journal.sandboxes(living=True)} == {"sb-1", "sb-2"}
    assert journal.op("sb-1", "a") == op("a", 1)
    assert journal.sessions("sb-1") == [SessionRow("ss-1", "sb-1", "open", 1.0, b"r")]
    assert journal.key("k") == KeyRow("k", b"request", b"ids", b"errors", 1.0)


async def test_it_is_committed_soon_without_a_flush(journal):
    called = []
    journal.put_op(op("a"), lambda: called.append(journal.op("sb-1", "a")))
    assert called == []
    await until(lambda: called)
    assert called[0] is not None


async def test_the_later_version_counts_within_and_between_commits(journal):
    journal.add_sandboxes([sandbox()])
    journal.set_status("sb-1", "stopping", False, None, b"2")
    journal.set_status("sb-1", "stopped", True, 5.0, b"3")
    journal.put_op(op("a"))
    journal.put_op(op("a", state="exited", stdout=b"out"))
    await journal.flush()
    assert journal.sandbox("sb-1") == SandboxRow("sb-1", "stopped", 1, 1.0, 5.0, b"spec", b"3")
    assert (journal.op("sb-1", "a").state, journal.op("sb-1", "a").result) == ("exited", b"result")
    assert await journal.output("sb-1", "a") == (b"out", b"err")
    journal.put_op(op("b", 2))
    await journal.flush()
    journal.put_op(op("b", 2, "exited", b"more"))
    await journal.flush()
    assert await journal.output("sb-1", "b") == (b"more", b"err")
    assert [row.op_id for row in journal.ops("sb-1")] == ["a", "b"]
    assert journal.ops("sb-1", running_only=True) == []
    assert journal.last_op("sb-1")[0] == 2


async def test_a_forgotten_operation_may_come_again(journal):
    journal.put_op(op("a", 1))
    await journal.flush()
    journal.forget_op("sb-1", "a")
    journal.put_op(op("a", 2))
    await journal.flush()
    assert journal.op("sb-1", "a").seq == 2
    journal.forget_op("sb-1", "a")
    await journal.flush()
    assert journal.op("sb-1", "a") is None


async def test_a_forgotten_operation_is_gone_before_the_commit_too(journal):
    journal.put_op(op("a", 1))
    await journal.flush()
    journal.forget_op("sb-1", "a")
    assert journal.op("sb-1", "a") is None
    await journal.flush()
    assert journal.op("sb-1", "a") is None
    journal.put_op(op("a", 2))
    await journal.flush()
    assert journal.op("sb-1", "a").seq == 2


async def test_those_who_flush_together_share_a_commit(journal, monkeypatch):
    commits = []
    done = journal._done
    monkeypatch.setattr(journal, "_done", lambda batch: (commits.append(batch), done(batch)))
    await asyncio.gather(*(journal.flush() for _ in range(50)))
    assert len(commits) == 1


async def test_outputs_of_many_bytes_survive_as_they_are(journal):
    data = bytes(range(256)) * 40_000
    journal.put_op(op("a", state="exited", stdout=data))
    await journal.flush()
    assert (await journal.output("sb-1", "a"))[0] == data
    assert journal.op("sb-1", "a").stdout is None


async def test_a_journal_that_cannot_be_written_says_so_and_loses_nothing(journal):
    """As on a full disk: SQLite refuses to let the file grow."""
    blocker = sqlite3.connect(journal.path, isolation_level=None)
    await journal.run(lambda db: db.execute("PRAGMA max_page_count=30").fetchone())
    called = []
    journal.put_op(op("large", state="exited", stdout=b"x" * 1_000_000), lambda: called.append("large"))
    journal.add_sandboxes([sandbox("sb-refused")])
    with pytest.raises(Overloaded) as raised:
        await journal.flush()
    assert raised.value.ran == "not-run"
    assert journal.failure is not None
    await journal.run(lambda db: db.execute("PRAGMA max_page_count=1000000").fetchone())
    await journal.flush()
    assert called == ["large"]
    assert journal.failure is None
    assert journal.sandbox("sb-refused") is None
    blocker.close()


async def test_it_is_congested_by_unwritten_output(journal, monkeypatch):
    monkeypatch.setattr("dsec.trajectory.journal.PENDING_LIMIT_BYTES", 1000)
    journal.put_op(op("a", state="exited", stdout=b"x" * 2000))
    assert journal.congested
    await journal.drain()
    assert not journal.congested
    assert journal.op("sb-1", "a") is not None


@pytest.mark.parametrize("limit", ["CHECKPOINT_BYTES", "WAL_LIMIT_BYTES"])
async def test_what_was_committed_reaches_the_database_file(journal, monkeypatch, limit):
    monkeypatch.setattr("dsec.trajectory.journal.CHECKPOINT_BYTES", 100_000)
    monkeypatch.setattr(f"dsec.trajectory.journal.{limit}", 100_000)
    for number in range(40):
        journal.put_op(op(f"op-{number}", number, "exited", b"x" * 50_000))
        await journal.flush()
    await until(lambda: journal.path.stat().st_size > 1_000_000)


async def test_a_foreign_schema_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "edge.db") as db:
        db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
        db.execute("INSERT INTO meta VALUES ('schema', '999')")
    db.close()
    with pytest.raises(RuntimeError, match="schema 999"):
        await Journal(tmp_path / "edge.db").open()


async def test_a_journal_of_the_first_schema_is_carried_over(tmp_path):
    with sqlite3.connect(tmp_path / "edge.db") as db:
        db.executescript("""
            CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
            INSERT INTO meta VALUES ('schema', '1');
            CREATE TABLE sessions (
                session_id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, state TEXT NOT NULL, created_at REAL NOT NULL, request BLOB NOT NULL
            ) WITHOUT ROWID;
            CREATE INDEX sessions_sandbox ON sessions (sandbox_id);
            INSERT INTO sessions VALUES ('main', 'sb-1', 'open', 1.0, x'72');
        """)
    db.close()
    for _ in range(2):
        journal = Journal(tmp_path / "edge.db")
        await journal.open()
        journal.put_session(SessionRow("main", "sb-2", "open", 2.0, b"s"))
        await journal.flush()
        assert journal.session("sb-1", "main") == SessionRow("main", "sb-1", "open", 1.0, b"r")
        assert journal.session("sb-2", "main") == SessionRow("main", "sb-2", "open", 2.0, b"s")
        assert journal.meta("schema") == "2"
        await journal.aclose()


async def test_old_records_are_dropped_and_living_ones_never(journal):
    journal.add_sandboxes([sandbox("sb-old", "stopped", 1, 10.0), sandbox("sb-new", "stopped", 1, 1000.0), sandbox("sb-live")])
    for sandbox_id in ("sb-old", "sb-new", "sb-live"):
        journal.put_op(op("a", state="exited", stdout=b"o", sandbox_id=sandbox_id))
        journal.put_session(SessionRow("ss-" + sandbox_id, sandbox_id, "closed", 1.0, b""))
    journal.put_key(KeyRow("k", b"", b"", b"", 10.0))
    await journal.flush()
    while await journal.run(lambda db: prune(db, 100.0, 1 << 40)):
        pass
    assert [journal.sandbox(name) is not None for name in ("sb-old", "sb-new", "sb-live")] == [False, True, True]
    assert [bool(journal.ops(name)) for name in ("sb-old", "sb-new", "sb-live")] == [False, True, True]
    assert journal.sessions("sb-old") == []
    assert journal.key("k") is None


async def test_a_journal_too_large_drops_those_that_ended_first(journal):
    for number in range(100):
        journal.add_sandboxes([sandbox(f"sb-{number}", "stopped", 1, float(number))])
        journal.put_op(op("a", state="exited", stdout=b"x" * 50_000, sandbox_id=f"sb-{number}"))
    journal.add_sandboxes([sandbox("sb-live")])
    journal.put_op(op("a", state="exited", stdout=b"x" * 50_000, sandbox_id="sb-live"))
    await journal.flush()
    while await journal.run(lambda db: prune(db, 0.0, 2_000_000)):
        pass
    left = {row.sandbox_id for row in journal.sandboxes(living=False)}
    assert "sb-99" in left
    assert "sb-0" not in left
    assert 20 <= len(left) <= 60
    assert journal.op("sb-live", "a") is not None


WRITER = """
    import asyncio, sys
    from dsec.trajectory import Journal, OpRow, SandboxRow
    from pathlib import Path

    async def main():
        journal = Journal(Path(sys.argv[1]))
        await journal.open()
        for number in range(1_000_000):
            journal.add_sandboxes([SandboxRow(f"sb-{number}", "creating", 0, 1.0, None, b"spec", b"status")])
            await journal.flush()
            print("made", number, flush=True)
            row = OpRow(f"sb-{number}", "a", 1, None, "exited", 0, 1.0, 2.0, b"request", b"result", b"x" * 5000, b"")
            journal.put_op(row, lambda number=number: print("done", number, flush=True))

    asyncio.run(main())
"""


async def test_output_of_living_ones_is_bounded_too(journal):
    journal.add_sandboxes([sandbox("sb-live")])
    for number in range(100):
        journal.put_op(op(f"op-{number:03}", number, "exited", b"x" * 50_000, "sb-live"))
        await journal.flush()
    monitor = [await journal.run(lambda db: prune(db, 0.0, 2_000_000))]
    while monitor[-1]:
        monitor.append(await journal.run(lambda db: prune(db, 0.0, 2_000_000)))
    assert len(journal.ops("sb-live")) == 100
    assert journal.op("sb-live", "op-000").result == b"result"
    assert await journal.output("sb-live", "op-000") is None


async def test_growth_is_told(journal):
    waiter = asyncio.ensure_future(journal.grown(100_000))
    journal.put_op(op("a", state="exited", stdout=b"x" * 50_000))
    await journal.flush()
    assert not waiter.done()
    journal.put_op(op("b", state="exited", stdout=b"x" * 60_000))
    await journal.flush()
    await asyncio.wait_for(waiter, 5)


def write_until_killed(path, lines: int) -> list[str]:
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True)
    try:
        said = [child.stdout.readline() for _ in range(lines)]
        os.kill(child.pid, signal.SIGKILL)
        return said + child.stdout.read().splitlines(keepends=True)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 7, 50, 400])
async def test_what_was_said_to_be_safe_survives_a_kill(tmp_path, lines):
    path = tmp_path / "edge.db"
    said = await asyncio.to_thread(write_until_killed, path, lines)
    journal = Journal(path)
    await journal.open()
    try:
        for line in said:
            if not line.endswith("\n"):
                continue
            what, number = line.split()
            if what == "made":
                assert journal.sandbox(f"sb-{number}") is not None
            else:
                assert (await journal.output(f"sb-{number}", "a"))[0] == b"x" * 5000
        assert await journal.run(lambda db: db.execute("PRAGMA integrity_check").fetchone()) == ("ok",)
    finally:
        await journal.aclose()


class Disk:
    """The writes of the journal, by number: those in `fail` are refused, those in `gated` wait for their gate."""

    def __init__(self, monkeypatch, fail, gated=()):
        self.begun = 0
        self.gates = {number: threading.Event() for number in gated}
        write = Batch.write

        def guarded(batch, db):
            self.begun += 1
            number = self.begun
            if number in self.gates:
                assert self.gates[number].wait(10)
            if number in fail:
                raise OSError(28, "No space left on device")
            write(batch, db)

        monkeypatch.setattr(Batch, "write", guarded)

    async def reached(self, number):
        await until(lambda: self.begun >= number)


async def test_a_flush_behind_a_commit_that_fails_takes_along_what_was_not_written(journal, monkeypatch):
    disk = Disk(monkeypatch, fail=[1], gated=[1])
    journal.put_pack(PackRow("op", "sb", "taking", 1.0, b"", b"", b""))
    journal._hand_over()  # nobody waits for this one: the writer's thread has it
    await disk.reached(1)
    flushing = asyncio.ensure_future(journal.flush())
    await asyncio.sleep(0)
    disk.gates[1].set()
    await flushing
    assert journal.pack("op").state == "taking"


async def test_a_flush_fails_while_what_came_before_cannot_be_written(journal, monkeypatch):
    disk = Disk(monkeypatch, fail=[1, 2], gated=[1])
    journal.put_pack(PackRow("op", "sb", "taking", 1.0, b"", b"", b""))
    journal._hand_over()
    await disk.reached(1)
    flushing = asyncio.ensure_future(journal.flush())
    await asyncio.sleep(0)
    disk.gates[1].set()
    with pytest.raises(Overloaded):
        await flushing
    assert journal.pack("op") is None
    await journal.flush()
    assert journal.pack("op").state == "taking"


async def test_an_end_that_was_acknowledged_is_not_overwritten_by_a_beginning_that_was_refused(journal, monkeypatch):
    disk = Disk(monkeypatch, fail=[1], gated=[1])
    acknowledged = []
    journal.put_op(op("a"))
    journal._hand_over()
    await disk.reached(1)
    journal.put_op(op("a", state="exited", stdout=b"output"), lambda: acknowledged.append(1))
    journal._hand_over()
    disk.gates[1].set()
    await until(lambda: acknowledged)
    await journal.flush()
    assert (journal.op("sb-1", "a").state, await journal.output("sb-1", "a")) == ("exited", (b"output", b"err"))


async def test_a_status_that_was_refused_does_not_overwrite_a_later_one(journal, monkeypatch):
    journal.add_sandboxes([sandbox("sb-1")])
    await journal.flush()
    disk = Disk(monkeypatch, fail=[1], gated=[1])
    journal.set_status("sb-1", "running", over=False, ended_at=None, status=b"untold")
    journal._hand_over()
    await disk.reached(1)
    journal.set_status("sb-1", "stopped", over=True, ended_at=3.0, status=b"over")
    journal._hand_over()
    disk.gates[1].set()
    await disk.reached(2)
    await journal.flush()
    assert journal.sandbox("sb-1").state == "stopped"
