"""An edge without kernel objects, for the tests of what lies between a client and an edge. The container suite proves the real one.

Commands are real processes of the test's user; sandboxes are entries in a dictionary.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
    SignalRequest,
    UpdateRequest,
)

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
        self.results: dict[str, ExecResult] = {}
        self.running: dict[str, asyncio.Task[ExecResult]] = {}
        self.creates_cancelled = 0
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

    def _begin(self, sandbox_id: str, request: ExecRequest) -> str:
        if self._sandbox(sandbox_id).state != "running":
            raise Conflict(f"{sandbox_id} is {self._sandbox(sandbox_id).state}", cause=self._sandbox(sandbox_id).state)
        if (request.argv is None) == (request.shell is None):
            raise InvalidArgument("give exactly one of argv and shell", field="argv")
        if self.on_exec is not None:
            self.on_exec(request)
        op_id = request.op_id or f"op-{next(_ids)}"
        if op_id not in self.results and op_id not in self.running:
            self.running[op_id] = asyncio.create_task(self._command(op_id, request))
        return op_id

    async def _command(self, op_id: str, request: ExecRequest) -> ExecResult:
        argv = request.argv or ["sh", "-c", request.shell or ""]
        started = time.time()
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=request.cwd
        )
        stdout, stderr = await process.communicate(request.stdin or b"")
        code = process.returncode or 0
        result = ExecResult(
            op_id=op_id,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=stdout,
            stderr=stderr,
            stdout_bytes=len(stdout),
            stderr_bytes=len(stderr),
            started_at=started,
        )
        self.results[op_id] = result
        del self.running[op_id]
        return result

    async def exec(self, sandbox_id: str, request: ExecRequest) -> ExecResult:
        op_id = self._begin(sandbox_id, request)
        if op_id in self.results:
            return self.results[op_id]
        try:
            return await asyncio.shield(self.running[op_id])
        except asyncio.CancelledError:
            self.execs_abandoned += 1
            raise

    async def start(self, sandbox_id: str, request: ExecRequest) -> ProcessInfo:
        return await self.process(sandbox_id, self._begin(sandbox_id, request))

    async def processes(self, sandbox_id: str) -> Sequence[ProcessInfo]:
        return [await self.process(sandbox_id, op_id) for op_id in [*self.results, *self.running]]

    async def process(self, sandbox_id: str, op_id: str) -> ProcessInfo:
        self._sandbox(sandbox_id)
        if op_id in self.running:
            return ProcessInfo(op_id=op_id, sandbox_id=sandbox_id, state="running")
        if op_id in self.results:
            return ProcessInfo(op_id=op_id, sandbox_id=sandbox_id, state="exited", result=self.results[op_id])
        raise NotFound(f"no operation {op_id}", field="op_id")

    async def result(self, sandbox_id: str, op_id: str, wait: float = 0.0) -> ExecResult:
        await self.process(sandbox_id, op_id)
        if op_id in self.running:
            await asyncio.wait([self.running[op_id]], timeout=wait)
        if op_id not in self.results:
            raise Conflict(f"{op_id} still runs", cause="running")
        return self.results[op_id]

    async def signal(self, sandbox_id: str, op_id: str, request: SignalRequest) -> None:
        await self.process(sandbox_id, op_id)

    async def aclose(self) -> None:
        for task in list(self.running.values()):
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
