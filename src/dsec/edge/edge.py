"""The edge: everything that one node does for its sandboxes, behind one object that the API server calls."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import structlog

from dsec.backends.protocol import Attachment, Backend, Channel, FilesConversation
from dsec.edge import clock
from dsec.edge.admission import host_memory_mb, raise_fd_limit
from dsec.edge.checks import check_user
from dsec.edge.core import Core
from dsec.edge.creation import Creation
from dsec.edge.held import HeldFiles
from dsec.edge.lifecycle import Lifecycle
from dsec.edge.lock import PidFile
from dsec.edge.operations import Operations
from dsec.edge.packs import Packs
from dsec.edge.records import info_from_row, sandbox_info
from dsec.edge.recovery import Recovery
from dsec.edge.sandbox import Sandbox
from dsec.edge.sessions import Sessions
from dsec.edge.settings import EdgeSettings
from dsec.edge.sweep import Sweep
from dsec.environments.deadlines import within_async
from dsec.environments.environment import EnvironmentStore
from dsec.trajectory import Journal
from libdsec.errors import DSecError, InvalidArgument
from libdsec.schema import (
    BatchResult,
    CreateRequest,
    ExecRequest,
    ExecResult,
    ForkRequest,
    NodeInfo,
    PackInfo,
    PackRequest,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
    SessionRequest,
    SessionRunRequest,
    SignalRequest,
    StreamOutput,
    UpdateRequest,
)

__all__ = ["Edge"]

log = structlog.get_logger("dsec.edge")
_NAME = re.compile(r"[a-z0-9]{1,24}")
LET_GO_SECONDS: Final = 3.0
"""At the end, for what the store is told."""


class Edge:
    """Construct, `open`, serve, `aclose`. Sandboxes outlive `aclose` and any death of the process; the next `open` has them again.

    All methods raise the errors of libdsec.errors. Cancelling `create` undoes it; cancelling any other call stops waiting, undoing nothing.
    """

    def __init__(
        self,
        *,
        backends: Sequence[Backend],
        environments: EnvironmentStore,
        state: Path,
        run: Path,
        name: str = "local",
        settings: EdgeSettings | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidArgument("an edge's name is 1 to 24 of a-z and 0-9", field="name")
        self.environments = environments
        self.state = state
        self.run = run
        self.name = name
        self._lock = PidFile(run / "dsec.pid")
        self._cpu_count = len(os.sched_getaffinity(0))
        self._core = core = Core(
            name=name,
            backends={backend.name: backend for backend in backends},
            environments=environments,
            journal=Journal(state / "edge.db"),
            settings=settings or EdgeSettings(),
        )
        self._operations = Operations(core)
        self._lifecycle = Lifecycle(core, self._operations)
        self._creation = Creation(core, self._cpu_count)
        self._sessions = Sessions(core, self._operations)
        self._recovery = Recovery(core, self._operations)
        self._packs = Packs(core)
        self._sweep = Sweep(core, self._operations)
        self._sweeping: list[asyncio.Task[None]] = []
        self._started_at = 0.0
        self._open = False

    # -- the node

    async def open(self) -> None:
        """Lock the run folder, take up what lives, remove what nobody knows. Conflict where another edge runs here."""
        core = self._core
        async with AsyncExitStack() as on_failure:
            self._lock.acquire()
            on_failure.callback(self._lock.release)
            raise_fd_limit()
            await core.store.open()
            await core.journal.open()
            on_failure.push_async_callback(core.journal.aclose)
            for backend in core.backends.values():
                await backend.open(core.on_backend_event)
                on_failure.push_async_callback(backend.aclose)
            on_failure.push_async_callback(core.settle_tasks)
            on_failure.callback(self._packs.interrupt)
            await self._packs.recover()
            await self._recovery.recover()
            await self._sweep.remove_unknown()
            on_failure.pop_all()
        self._open = True
        self._sweeping = [core.spawn(self._sweep.run()), core.spawn(self._sweep.prune_as_it_grows()), core.spawn(core.store.run())]
        self._started_at = time.time()

    async def aclose(self) -> None:
        """Finish what is under way, write what is pending, let go. No sandbox ends. A store that is away is not waited for."""
        core = self._core
        if not self._open:
            return
        self._open = False
        core.draining = True
        core.timers.close()
        try:
            await self._finish()
        finally:
            await core.journal.aclose()
            core.threads.shutdown(wait=False)
            self._lock.release()

    async def _finish(self) -> None:
        core = self._core
        for task in self._sweeping:
            task.cancel()
        self._packs.interrupt()
        await core.settle_tasks()
        await self._packs.aclose()
        for sandbox in list(core.sandboxes.values()):
            if sandbox.channel is not None:
                await sandbox.channel.aclose()
        # Before the backends: the server of packs lives in their group of daemons.
        owners = core.owners()
        await self._let_go("sweep mounts", lambda: core.environments.sweep_mounts(owners))
        await self._let_go("close", core.environments.close)
        for backend in core.backends.values():
            await backend.aclose()

    async def _let_go(self, what: str, action: Callable[[], object]) -> None:
        """In a thread of its own, as the pool's may all hang in the store. What is not done in time the next start or end does."""
        try:
            await within_async(LET_GO_SECONDS, what, action)
        except TimeoutError as error:
            log.warning("the store is not waited for at the end", what=what, error=str(error))

    async def node_info(self) -> NodeInfo:
        """What this node is and can do."""
        core = self._core
        capabilities: dict[str, bool] = {}
        for name, backend in core.backends.items():
            able = backend.capabilities()
            capabilities |= {f"{name}.{field}": getattr(able, field) for field in able.__dataclass_fields__}
        return NodeInfo(
            edge=self.name,
            version=_version(),
            state="draining" if core.draining else "serving",
            backends=list(core.backends),
            sandboxes=len(core.sandboxes),
            cpu_count=self._cpu_count,
            memory_total_mb=host_memory_mb(),
            kernel=platform.release(),
            capabilities=capabilities,
            pid=os.getpid(),
            started_at=self._started_at,
        )

    def metrics(self) -> dict[str, float]:
        """Counters since the start, and gauges, by name."""
        core = self._core
        states: dict[str, float] = {}
        for sandbox in core.sandboxes.values():
            key = f"sandboxes_{sandbox.status.state}"
            states[key] = states.get(key, 0) + 1
        operations = sum(len(sandbox.ops) for sandbox in core.sandboxes.values())
        return {
            **{f"{name}_total": value for name, value in core.counters.items()},
            **states,
            "sandboxes_live": len(core.sandboxes),
            "operations_running": operations,
            "journal_failed": float(core.journal.failure is not None),
            **core.store.metrics(),
        }

    # -- sandboxes

    async def create(self, request: CreateRequest, idempotency_key: str | None = None) -> BatchResult:
        """Make `request.count` sandboxes. They are ready to run commands on return.

        Some failing are told in the result's errors; where the only one fails, its error is raised. Repeating a key gives the same
        sandboxes, also while they are being made; Conflict where the key was used for another request.
        """
        return await self._creation.create(request, idempotency_key)

    async def fork(self, sandbox_id: str, request: ForkRequest, idempotency_key: str | None = None) -> BatchResult:
        """Make `request.count` sandboxes that begin with the files that this one has now. It stands meanwhile for some milliseconds.

        All else as in `create`. A paused sandbox can be forked and stays paused; its forks run.
        """
        return await self._creation.fork(sandbox_id, request, idempotency_key)

    async def pack_diff(self, sandbox_id: str, request: PackRequest, wait: float = 0.0) -> PackInfo:
        """Make what it has written a layer; it stands for some milliseconds. Returns when that is over, or the whole after up to `wait`
        seconds.

        A paused sandbox can be packed and stays paused. The pack goes on whoever leaves, also when the sandbox ends or this process dies.
        A repeated op id gives the record of the first. Raises what keeps it from beginning; what fails later is in the record's `error`.
        """
        return await self._packs.pack(sandbox_id, request, wait)

    async def pack_info(self, op_id: str, wait: float = 0.0) -> PackInfo:
        """The record of a pack, after up to `wait` seconds if it is under way. NotFound if there is none."""
        return await self._packs.get(op_id, wait)

    async def list(self, state: str | None = None, labels: dict[str, str] | None = None) -> Sequence[SandboxInfo]:
        """All that are live and the last thousand that ended, or those in `state`, with all of `labels`; oldest first."""
        core = self._core
        found = [sandbox_info(sandbox.spec, sandbox.status) for sandbox in core.sandboxes.values()]
        if state in (None, "stopped", "failed"):
            found += [info_from_row(row) for row in core.journal.sandboxes(living=False) if row.sandbox_id not in core.sandboxes]
        if state is not None:
            found = [info for info in found if info.state == state]
        if labels:
            found = [info for info in found if all(info.labels.get(key) == value for key, value in labels.items())]
        return sorted(found, key=lambda info: (info.created_at, info.sandbox_id))

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """One sandbox, with what it uses now."""
        core = self._core
        sandbox = core.find(sandbox_id)
        if sandbox is None:
            row = core.journal.sandbox(sandbox_id)
            assert row is not None, "find has seen it"
            return info_from_row(row)
        info = sandbox_info(sandbox.spec, sandbox.status)
        info.idle_seconds = sandbox.machine.idle_seconds(clock.now())
        info.running_processes = sum(1 for op in sandbox.ops.values() if op.state == "running")
        if sandbox.status.state in ("running", "pausing", "paused", "resuming"):
            try:
                usage = await sandbox.backend.usage(sandbox.spec)
            except DSecError:
                return info
            info.memory_bytes = usage.memory_bytes
            info.memory_peak_bytes = usage.memory_peak_bytes
            info.cpu_seconds = usage.cpu_seconds
            info.disk_bytes = usage.disk_bytes
        return info

    async def update(self, sandbox_id: str, request: UpdateRequest) -> SandboxInfo:
        """Change time limits and labels. It counts as activity: the idle clock starts anew."""
        return await self._lifecycle.update(sandbox_id, request)

    async def stop(self, sandbox_id: str) -> SandboxInfo:
        """End it and remove all of it, in whatever state it is; on return nothing is left. Repeating gives the same answer.

        Where something could not be removed, the answer is still `stopping`, its `detail` says what, and the edge goes on trying.
        """
        return await self._lifecycle.stop(sandbox_id)

    @property
    def unremoved(self) -> int:
        """How many sandboxes live, or have left something that is not removed yet."""
        return len(self._core.unremoved())

    async def stop_all(self, patience_seconds: float = 60.0) -> int:
        """Stop every sandbox; a removal that fails is tried again until nothing is left, or for that long.

        A process that was killed in the middle of a long write is gone only when its disk has answered. Returns how many are left.
        """
        return await self._lifecycle.stop_all(patience_seconds)

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        """Freeze it. The next use resumes it."""
        return await self._lifecycle.pause(sandbox_id)

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        """Thaw it."""
        return await self._lifecycle.resume(sandbox_id)

    # -- commands

    async def exec(self, sandbox_id: str, request: ExecRequest) -> ExecResult:
        """Run a command and wait for it. Leaving does not end it: its result is under its op id.

        A repeated op id runs nothing: the answer is the first one's, `replayed`, waiting for it where it still runs. Conflict where the id
        was another request's. SandboxFailed where the sandbox ended meanwhile, OutcomeUnknown where only the conversation broke.
        """
        return await self._operations.exec(sandbox_id, request)

    async def start(self, sandbox_id: str, request: ExecRequest) -> ProcessInfo:
        """Start a command and return when it runs. Repeating an op id gives the first one's process."""
        return await self._operations.start(sandbox_id, request)

    async def processes(self, sandbox_id: str) -> Sequence[ProcessInfo]:
        """All operations on record, ended ones first, then in the order of their requests."""
        return await self._operations.processes(sandbox_id)

    async def process(self, sandbox_id: str, op_id: str) -> ProcessInfo:
        """One operation."""
        return await self._operations.process(sandbox_id, op_id)

    async def result(self, sandbox_id: str, op_id: str, wait: float = 0.0) -> ExecResult:
        """The result with the kept output.

        Conflict(cause="running") where it has none after `wait` seconds; OutcomeUnknown where it never will.
        """
        return await self._operations.result(sandbox_id, op_id, wait)

    async def output(self, sandbox_id: str, op_id: str, stream: int, offset: int = 0, limit: int = 1 << 20) -> StreamOutput:
        """Kept output of `stream` (1 or 2) from `offset`, at most `limit` bytes; of a running command, what is there now."""
        return await self._operations.output(sandbox_id, op_id, stream, offset, limit)

    async def signal(self, sandbox_id: str, op_id: str, request: SignalRequest) -> None:
        """Signal a command's leader or its whole tree. Conflict where it has ended."""
        await self._operations.signal(sandbox_id, op_id, request)

    async def attach(
        self, sandbox_id: str, op_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0, credit: int = 4 << 20
    ) -> Attachment:
        """A live view of a command, or its record where it has ended. Being attached to a running one is activity, until it is closed."""
        return await self._operations.attach(sandbox_id, op_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset, credit=credit)

    # -- sessions

    async def open_session(self, sandbox_id: str, request: SessionRequest) -> SessionInfo:
        """A shell that keeps its folder and environment between commands."""
        return await self._sessions.open_session(sandbox_id, request)

    async def sessions(self, sandbox_id: str) -> Sequence[SessionInfo]:
        """Open and closed ones."""
        return await self._sessions.sessions(sandbox_id)

    async def run_in_session(self, sandbox_id: str, session_id: str, request: SessionRunRequest) -> ExecResult:
        """Run in a session's shell and wait; as `exec` in all else."""
        return await self._sessions.run_in_session(sandbox_id, session_id, request)

    async def close_session(self, sandbox_id: str, session_id: str) -> None:
        """End the shell and its whole tree. Closing twice is no error."""
        await self._sessions.close_session(sandbox_id, session_id)

    # -- files and ports

    async def files(self, sandbox_id: str, user: str = "") -> FilesConversation:
        """File operations as `user` (empty: the sandbox's own). An open conversation is activity."""
        if user:
            check_user(user)
        sandbox, channel = await self._use(sandbox_id)
        conversation = await channel.files(user or sandbox.spec.user)
        return HeldFiles(self._core, sandbox, conversation)

    async def connect(self, sandbox_id: str, port: int) -> int:
        """A connected socket's descriptor into the sandbox. Whoever pumps bytes over it holds the sandbox by `hold` meanwhile."""
        if not 1 <= port <= 65535:
            raise InvalidArgument(f"port is {port}, allowed is 1 to 65535", field="port")
        sandbox, channel = await self._use(sandbox_id)
        sandbox.machine.touch(clock.now())
        return await channel.connect(port)

    async def _use(self, sandbox_id: str) -> tuple[Sandbox, Channel]:
        sandbox = self._core.living(sandbox_id)
        return sandbox, await self._core.usable(sandbox)

    def hold(self, sandbox_id: str) -> AbstractContextManager[None]:
        """While the block runs the sandbox is in use: its idle clock stands."""
        return self._core.activity(self._core.living(sandbox_id))


def _version() -> str:
    try:
        return version("dsec")
    except PackageNotFoundError:
        return "0"
