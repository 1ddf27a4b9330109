"""What the edge holds in memory of a live sandbox and of its operations."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

import msgspec

from dsec.backends.protocol import Backend, Channel, SandboxSpec
from dsec.edge.machine import Machine, Status
from dsec.trajectory import OpRow, SandboxRow, SessionRow
from libdsec.errors import DSecError
from libdsec.schema import ExecResult

__all__ = ["Operation", "Sandbox"]

_encode = msgspec.msgpack.Encoder().encode
OpState = Literal["running", "exited", "lost"]


class Operation:
    """A command from its request until its record is safe. `waiter` is made by the first who waits for it besides its own caller."""

    __slots__ = (
        "attended",
        "background",
        "busy",
        "collecting",
        "ended_at",
        "kept",
        "op_id",
        "outcome",
        "pid",
        "request",
        "result",
        "seq",
        "session_id",
        "started_at",
        "state",
        "views",
        "waiter",
    )

    def __init__(self, op_id: str, seq: int, request: bytes, *, session_id: str | None, background: bool, started_at: float) -> None:
        self.op_id = op_id
        self.seq = seq
        self.request = request
        self.session_id = session_id
        self.background = background
        self.started_at = started_at
        self.ended_at: float | None = None
        self.state: OpState = "running"
        self.pid: int | None = None
        self.attended = False
        """A call of the channel is under way that will bring its end."""
        self.busy = False
        """It counts as activity."""
        self.collecting = False
        self.result: ExecResult | None = None
        self.outcome: DSecError | None = None
        """Why there is no result, where there never will be one."""
        self.views = 0
        """Live views of it that are open."""
        self.kept = False
        """Its result is on disk, and aether still keeps it for them."""
        self.waiter: asyncio.Future[None] | None = None

    def row(self, sandbox_id: str) -> OpRow:
        """As the journal keeps it."""
        result = self.result
        if result is None:
            return OpRow(
                sandbox_id,
                self.op_id,
                self.seq,
                self.session_id,
                self.state,
                self.background,
                self.started_at,
                self.ended_at,
                self.request,
                None,
            )
        meta = msgspec.structs.replace(result, stdout=b"", stderr=b"")
        return OpRow(
            sandbox_id,
            self.op_id,
            self.seq,
            self.session_id,
            self.state,
            self.background,
            self.started_at,
            self.ended_at,
            self.request,
            _encode(meta),
            result.stdout,
            result.stderr,
        )

    def settle(self) -> None:
        """Wake who waits."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Done when the operation has ended."""
        if self.waiter is None:
            self.waiter = asyncio.get_running_loop().create_future()
            if self.state != "running":
                self.waiter.set_result(None)
        return self.waiter


class Sandbox:
    """A sandbox that is not over: its machine, its channel, its running operations."""

    __slots__ = (
        "acking",
        "backend",
        "channel",
        "early_ends",
        "error",
        "kept",
        "launch",
        "machine",
        "ops",
        "seq",
        "sessions",
        "spec",
        "spec_blob",
        "timer",
        "unacknowledged",
        "waiters",
        "work",
    )

    def __init__(self, spec: SandboxSpec, backend: Backend, status: Status) -> None:
        self.spec = spec
        self.spec_blob = _encode(spec)
        self.backend = backend
        self.machine = Machine(status)
        self.channel: Channel | None = None
        self.ops: dict[str, Operation] = {}
        self.sessions: dict[str, SessionRow] = {}
        self.seq = 0
        self.kept = 0
        """How many of its operations are `kept`."""
        self.launch: asyncio.Task[None] | None = None
        self.work: asyncio.Task[None] | None = None
        """The last of the chained calls of the backend about this sandbox."""
        self.waiters: asyncio.Future[None] | None = None
        self.timer: float | None = None
        """The earliest deadline that is in the edge's heap for it."""
        self.error: DSecError | None = None
        """Why the launch, or the last pause or resume, failed."""
        self.unacknowledged: deque[Operation] = deque()
        self.acking = False
        self.early_ends: set[str] | None = None
        """While it is being adopted: sessions that ended before their operations were known again."""

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.spec.sandbox_id

    @property
    def status(self) -> Status:
        """The machine's status."""
        return self.machine.status

    @property
    def over(self) -> bool:
        """Ended, and nothing of it is left on the host."""
        return self.machine.status.clean

    def row(self) -> SandboxRow:
        """As the journal keeps it."""
        status = self.status
        return SandboxRow(self.id, status.state, int(status.clean), status.created_at, status.ended_at, self.spec_blob, _encode(status))

    def changed(self) -> asyncio.Future[None]:
        """Done at the next change of state. Shield it: others wait for the same."""
        if self.waiters is None:
            self.waiters = asyncio.get_running_loop().create_future()
        return self.waiters

    def wake(self) -> None:
        """The state has changed."""
        if self.waiters is not None:
            self.waiters.set_result(None)
            self.waiters = None
