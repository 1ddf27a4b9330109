"""An edge without kernel objects, for the tests of what lies between a client and an edge. The container suite proves the real one.

Commands are real processes of the test's user; sandboxes are entries in a dictionary.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from files_double import FilesDouble
from process_double import AttachmentDouble, ProcessDouble, SessionDouble, send_signal

from libdsec.errors import Conflict, InvalidArgument, NotFound, Unsupported
from libdsec.schema import (
    BatchResult,
    CreateRequest,
    EnvironmentInfo,
    ExecRequest,
    ExecResult,
    NodeInfo,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
    SessionRequest,
    SessionRunRequest,
    SignalRequest,
    StreamOutput,
    UpdateRequest,
)
from libdsec.signals import signal_number

_ids = itertools.count(1)


class Catalog:
    """Two environments."""

    def __init__(self) -> None:
        self.entries = {name: EnvironmentInfo(name=name, digest="sha256:" + "0" * 64, kind="base") for name in ("debian", "alpine")}

    def list(self) -> list[EnvironmentInfo]:
        return list(self.entries.values())

    def show(self, name: str) -> EnvironmentInfo:
        try:
            return self.entries[name]
        except KeyError:
            raise NotFound(f"no environment {name}", field="environment") from None

    def remove(self, name: str) -> None:
        self.show(name)
        del self.entries[name]


class EdgeDouble:
    """Keeps the contract of dsec.apiserver.contract.EdgeApi."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self.environments = Catalog()
        self.sandboxes: dict[str, SandboxInfo] = {}
        self.by_key: dict[str, BatchResult] = {}
        self.commands: dict[str, ProcessDouble] = {}
        self.runs = 0
        self.held = 0
        self.attachments: list[AttachmentDouble] = []
        self.open_sessions: dict[str, SessionDouble] = {}
        self.files_users: list[str] = []
        self.creates_cancelled = 0
        self.creates_waiting = 0
        self.execs_abandoned = 0
        self.create_gate: asyncio.Event | None = None
        self.on_exec: Callable[[ExecRequest], None] | None = None

    async def node_info(self) -> NodeInfo:
        return NodeInfo(edge="double", version="1", backends=["container"], sandboxes=len(self.sandboxes))

    async def create(self, request: CreateRequest, idempotency_key: str | None = None) -> BatchResult:
        if request.backend != "container":
            raise Unsupported(f"no backend {request.backend}", field="backend")
        if request.args.container_image not in self.environments.entries:
            raise NotFound(f"no environment {request.args.container_image!r}", field="container_image")
        if idempotency_key and idempotency_key in self.by_key:
            return self.by_key[idempotency_key]
        if self.create_gate is not None:
            self.creates_waiting += 1
            try:
                await self.create_gate.wait()
            except asyncio.CancelledError:
                self.creates_cancelled += 1
                raise
        made = [
            SandboxInfo(
                sandbox_id=f"sb-double-{next(_ids):06}",
                backend="container",
                state="running",
                created_at=time.time(),
                labels=request.args.labels,
            )
            for _ in range(request.count)
        ]
        self.sandboxes.update((each.sandbox_id, each) for each in made)
        batch = BatchResult(sandboxes=made)
        if idempotency_key:
            self.by_key[idempotency_key] = batch
        return batch

    def _sandbox(self, sandbox_id: str) -> SandboxInfo:
        try:
            return self.sandboxes[sandbox_id]
        except KeyError:
            raise NotFound(f"no sandbox {sandbox_id}", field="sandbox_id") from None

    async def list(self, state: str | None = None, labels: dict[str, str] | None = None) -> Sequence[SandboxInfo]:
        return [
            each
            for each in self.sandboxes.values()
            if (state is None or each.state == state) and all(each.labels.get(key) == value for key, value in (labels or {}).items())
        ]

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return self._sandbox(sandbox_id)

    async def update(self, sandbox_id: str, request: UpdateRequest) -> SandboxInfo:
        sandbox = self._sandbox(sandbox_id)
        if request.labels is not None:
            sandbox.labels = request.labels
        return sandbox

    async def stop(self, sandbox_id: str) -> SandboxInfo:
        sandbox = self._sandbox(sandbox_id)
        sandbox.state = "stopped"
        return sandbox

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        sandbox = self._sandbox(sandbox_id)
        sandbox.state = "paused"
        return sandbox

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        sandbox = self._sandbox(sandbox_id)
        sandbox.state = "running"
        return sandbox

    def _begin(self, sandbox_id: str, request: ExecRequest) -> ProcessDouble:
        state = self._sandbox(sandbox_id).state
        if state != "running":
            raise Conflict(f"{sandbox_id} is {state}", cause=state)
        if (request.argv is None) == (request.shell is None):
            raise InvalidArgument("give exactly one of argv and shell", field="argv")
        if self.on_exec is not None:
            self.on_exec(request)
        op_id = request.op_id or f"op-{next(_ids)}"
        process = self.commands.get(op_id)
        if process is None:
            self.runs += 1
            process = self.commands[op_id] = ProcessDouble(op_id, request)
        return process

    def _command(self, sandbox_id: str, op_id: str) -> ProcessDouble:
        self._sandbox(sandbox_id)
        try:
            return self.commands[op_id]
        except KeyError:
            raise NotFound(f"no operation {op_id}", field="op_id") from None

    async def exec(self, sandbox_id: str, request: ExecRequest) -> ExecResult:
        process = self._begin(sandbox_id, request)
        try:
            return await asyncio.shield(process.task)
        except asyncio.CancelledError:
            self.execs_abandoned += 1
            raise

    async def start(self, sandbox_id: str, request: ExecRequest) -> ProcessInfo:
        process = self._begin(sandbox_id, request)
        await process.ready.wait()
        return self._process_info(sandbox_id, process)

    def _process_info(self, sandbox_id: str, process: ProcessDouble) -> ProcessInfo:
        result = process.result
        return ProcessInfo(
            op_id=process.op_id,
            sandbox_id=sandbox_id,
            state="running" if result is None else "exited",
            pid=process.pid,
            argv=process.request.argv,
            shell=process.request.shell,
            background=process.request.background,
            result=None if result is None else msgspec.structs.replace(result, stdout=b"", stderr=b""),
        )

    async def processes(self, sandbox_id: str) -> Sequence[ProcessInfo]:
        self._sandbox(sandbox_id)
        return [self._process_info(sandbox_id, each) for each in self.commands.values()]

    async def process(self, sandbox_id: str, op_id: str) -> ProcessInfo:
        return self._process_info(sandbox_id, self._command(sandbox_id, op_id))

    async def result(self, sandbox_id: str, op_id: str, wait: float = 0.0) -> ExecResult:
        process = self._command(sandbox_id, op_id)
        if process.result is None:
            await asyncio.wait([process.task], timeout=wait)
        if process.result is None:
            raise Conflict(f"{op_id} still runs", cause="running")
        return msgspec.structs.replace(process.result, replayed=True)

    async def signal(self, sandbox_id: str, op_id: str, request: SignalRequest) -> None:
        send_signal(self._command(sandbox_id, op_id), signal_number(request.signal))

    async def attach(
        self, sandbox_id: str, op_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0, credit: int = 4 << 20
    ) -> AttachmentDouble:
        attachment = AttachmentDouble(self._command(sandbox_id, op_id), stdout_offset, stderr_offset, credit)
        self.attachments.append(attachment)
        return attachment

    async def open_session(self, sandbox_id: str, request: SessionRequest) -> SessionInfo:
        self._sandbox(sandbox_id)
        session_id = request.session_id or f"ss-{next(_ids)}"
        if session_id not in self.open_sessions:
            self.open_sessions[session_id] = await SessionDouble.open(request.cwd)
        return SessionInfo(session_id=session_id, sandbox_id=sandbox_id)

    async def sessions(self, sandbox_id: str) -> Sequence[SessionInfo]:
        return [SessionInfo(session_id=each, sandbox_id=sandbox_id) for each in self.open_sessions]

    async def run_in_session(self, sandbox_id: str, session_id: str, request: SessionRunRequest) -> ExecResult:
        if session_id not in self.open_sessions:
            raise NotFound(f"no session {session_id}", field="session_id")
        return await self.open_sessions[session_id].run(request.op_id or f"op-{next(_ids)}", request.shell)

    async def close_session(self, sandbox_id: str, session_id: str) -> None:
        if session_id not in self.open_sessions:
            raise NotFound(f"no session {session_id}", field="session_id")
        await self.open_sessions.pop(session_id).close()

    async def files(self, sandbox_id: str, user: str) -> FilesDouble:
        self._sandbox(sandbox_id)
        if self.root is None:
            raise Unsupported("this double has no files")
        self.files_users.append(user)
        return FilesDouble(self.root)

    async def connect(self, sandbox_id: str, port: int) -> int:
        self._sandbox(sandbox_id)
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        except OSError as error:
            connection.close()
            raise NotFound(f"nothing listens on port {port}: {error.strerror}", field="port", cause="refused") from None
        return connection.detach()

    @contextlib.contextmanager
    def hold(self, sandbox_id: str):
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    def metrics(self) -> dict[str, float]:
        return {"operations_started_total": float(self.runs), "sandboxes_live": float(len(self.sandboxes))}

    async def output(self, sandbox_id: str, op_id: str, stream: int, offset: int = 0, limit: int = 1 << 20) -> StreamOutput:
        process = self._command(sandbox_id, op_id)
        data = bytes(process.kept[stream][offset : offset + limit])
        return StreamOutput(data=data, offset=offset, next_offset=offset + len(data), eof=process.ended[stream])

    async def aclose(self) -> None:
        tasks = [each.task for each in self.commands.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self.open_sessions.values():
            await session.close()
