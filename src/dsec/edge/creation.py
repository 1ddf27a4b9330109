"""Creating and forking sandboxes: checked, admitted, on record, then launched, a batch in one request.

A client that leaves before the answer leaves no sandbox behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

import msgspec
import structlog

from dsec.backends.protocol import Backend, SandboxSpec
from dsec.edge import clock
from dsec.edge.admission import host_memory_mb
from dsec.edge.checks import check_create, fitted
from dsec.edge.core import Core
from dsec.edge.events import Launched, LaunchFailed, StopWanted
from dsec.edge.forks import fork_plan
from dsec.edge.ids import new_op_id, new_sandbox_id
from dsec.edge.machine import Status
from dsec.edge.records import decode_errors, decode_ids, encode, error_body, info_from_row, sandbox_info
from dsec.edge.sandbox import Sandbox
from dsec.edge.snapshots import drop_snapshot, take_snapshot
from dsec.trajectory.rows import KeyRow
from libdsec.errors import Conflict, DSecError, InvalidArgument, Overloaded, SandboxFailed, Unsupported
from libdsec.schema import BackendName, BatchResult, ContainerRunArgs, CreateRequest, ErrorBody, FailureCause, ForkRequest, SandboxInfo

if TYPE_CHECKING:
    from dsec.environments import ResolvedEnvironment

__all__ = ["Creation"]

log = structlog.get_logger("dsec.edge")
HOSTNAME = "sandbox"
ALIVE = ("running", "pausing", "paused", "resuming")


class Creation:
    """`create` and what it needs. One Future a key makes two requests with one idempotency key wait for one creation."""

    def __init__(self, core: Core, cpu_count: int) -> None:
        self._core = core
        self._cpu_count = cpu_count
        self._memory_mb = host_memory_mb()
        self._keys: dict[str, asyncio.Future[None]] = {}

    async def create(self, request: CreateRequest, idempotency_key: str | None) -> BatchResult:
        """See Edge.create."""
        return await self._once(idempotency_key, encode(request), lambda: self._create(request, idempotency_key))

    async def fork(self, sandbox_id: str, request: ForkRequest, idempotency_key: str | None) -> BatchResult:
        """See Edge.fork."""
        wanted = encode((sandbox_id, request))
        return await self._once(idempotency_key, wanted, lambda: self._fork(sandbox_id, request, wanted, idempotency_key))

    async def _once(self, key: str | None, wanted: bytes, make: Callable[[], Awaitable[BatchResult]]) -> BatchResult:
        if key is None:
            return await make()
        if not 1 <= len(key) <= 128 or "\0" in key:
            raise InvalidArgument("an idempotency key has 1 to 128 characters", field="Idempotency-Key")
        while (first := self._keys.get(key)) is not None:
            await asyncio.shield(first)
        if (row := self._core.journal.key(key)) is not None:
            return self._again(row, wanted)
        self._keys[key] = asyncio.get_running_loop().create_future()
        try:
            result = await make()
        except BaseException:
            # A repeat must not find the record of what is being undone: the key is free when the journal says so.
            self._core.journal.forget_key(key)
            self._core.spawn(self._free(key))
            raise
        self._keys.pop(key).set_result(None)
        return result

    async def _free(self, key: str) -> None:
        try:
            await self._core.journal.flush()
        finally:
            self._keys.pop(key).set_result(None)

    def _again(self, row: KeyRow, wanted: bytes) -> BatchResult:
        if row.request != wanted:
            raise Conflict("this idempotency key was used for another request", field="Idempotency-Key", cause="key-reused")
        infos: list[SandboxInfo] = []
        for sandbox_id in decode_ids(row.sandbox_ids):
            if (sandbox := self._core.sandboxes.get(sandbox_id)) is not None:
                infos.append(sandbox_info(sandbox.spec, sandbox.status))
            elif (ended := self._core.journal.sandbox(sandbox_id)) is not None:
                infos.append(info_from_row(ended))
        return BatchResult(sandboxes=infos, errors=decode_errors(row.errors))

    async def _create(self, request: CreateRequest, key: str | None) -> BatchResult:
        core = self._core
        if core.draining:
            raise Overloaded("this node is shutting down", cause="draining")
        args = self._checked(request.args, request.backend, request.count)
        backend = core.backends.get(request.backend)
        if backend is None:
            raise Unsupported(f"this node has no backend {request.backend}, it has {', '.join(core.backends)}", field="backend")
        backend.validate(args)
        resolved = await self._resolve(request)
        core.admission.admit(request.count, len(core.sandboxes), core.launching)
        plan = SandboxSpec(
            sandbox_id="",
            generation=1,
            args=args,
            layers=[str(layer) for layer in resolved.layers],
            range_index=-1,
            env={**resolved.env, **args.env},
            workdir=args.workdir or resolved.workdir or "/",
            user=args.init_user or resolved.user or "root",
            hostname=args.hostname or HOSTNAME,
            backend=request.backend,
            renewed=any(layer.kind == "snapshot" for layer in resolved.layers),
        )
        return await self._make(plan, request.count, backend, key, encode(request))

    async def _fork(self, sandbox_id: str, request: ForkRequest, wanted: bytes, key: str | None) -> BatchResult:
        core = self._core
        if core.draining:
            raise Overloaded("this node is shutting down", cause="draining")
        parent = core.living(sandbox_id)
        plan = fork_plan(parent.spec, request)
        plan = msgspec.structs.replace(plan, args=self._checked(plan.args, plan.backend, request.count))
        if not parent.backend.capabilities().fork:
            raise Unsupported(f"the backend {plan.backend} cannot fork on this host", field="backend")
        parent.backend.validate(plan.args)
        core.admission.admit(request.count, len(core.sandboxes), core.launching)
        plan = msgspec.structs.replace(plan, snapshot=f"fork-{new_op_id()}")
        stopped_ms = await take_snapshot(core, parent, plan.snapshot, branchable=True)
        try:
            if core.draining:
                raise Overloaded("this node is shutting down", cause="draining")
            result = await self._make(plan, request.count, parent.backend, key, wanted)
        finally:
            core.spawn(drop_snapshot(core, parent, plan.snapshot))
        result.stopped_ms = round(stopped_ms, 3)
        return result

    def _checked(self, args: ContainerRunArgs, backend: BackendName, count: int) -> ContainerRunArgs:
        """The args as they hold here, or the error that refuses them."""
        args = fitted(args, self._memory_mb, self._cpu_count)
        check_create(CreateRequest(args=args, backend=backend, count=count), self._memory_mb, self._cpu_count)
        return args

    async def _make(self, plan: SandboxSpec, count: int, backend: Backend, key: str | None, wanted: bytes) -> BatchResult:
        core = self._core
        sandboxes, errors = self._prepare(plan, count, backend)
        try:
            await self._enter(sandboxes)
            if plan.snapshot:
                # Whose disk fails here is tried again, and told why, at its launch.
                await self._branch(plan.snapshot, sandboxes, backend)
            beginning = [sandbox for sandbox in sandboxes if sandbox.status.state == "creating"]
            for sandbox in beginning:
                sandbox.launch = core.spawn(self._launch(sandbox))
            if beginning:
                await asyncio.wait([sandbox.launch for sandbox in beginning if sandbox.launch is not None])
            made = [sandbox for sandbox in sandboxes if sandbox.status.state in ALIVE]
            errors += [error_body(self._why(sandbox)) for sandbox in sandboxes if sandbox.status.state not in ALIVE]
            for sandbox in made:
                sandbox.status.told = True
                core.record(sandbox)
            if key is not None and made:
                core.journal.put_key(KeyRow(key, wanted, encode([sandbox.id for sandbox in made]), encode(errors), clock.now()))
            # On record before anybody is told: what a restart finds untold, it removes.
            await core.journal.flush()
        except BaseException:
            for sandbox in sandboxes:
                core.apply(sandbox, StopWanted("requested"))
            raise
        if not made and count == 1:
            raise self._why(sandboxes[0]) if sandboxes else _as_error(errors[0])
        return BatchResult(sandboxes=[sandbox_info(sandbox.spec, sandbox.status) for sandbox in made], errors=errors)

    async def _branch(self, snapshot: str, sandboxes: list[Sandbox], backend: Backend) -> None:
        """Whoever is stopped meanwhile is removed once its disk is there."""

        async def branch() -> None:
            await backend.branch(snapshot, [sandbox.spec for sandbox in sandboxes])

        branching = self._core.spawn(branch())
        for sandbox in sandboxes:
            sandbox.work = branching
        await asyncio.shield(branching)
        for sandbox in sandboxes:
            if sandbox.work is branching:
                sandbox.work = None

    async def _resolve(self, request: CreateRequest) -> ResolvedEnvironment:
        args = request.args
        if args.environment:
            return await self._core.store.resolve(args.environment, "environment")
        return await self._core.store.resolve([args.container_image], "container_image")

    def _prepare(self, plan: SandboxSpec, count: int, backend: Backend) -> tuple[list[Sandbox], list[ErrorBody]]:
        core = self._core
        args = plan.args
        now = clock.now()
        sandboxes: list[Sandbox] = []
        errors: list[ErrorBody] = []
        for _ in range(count):
            sandbox_id = new_sandbox_id(core.name)
            try:
                range_index = backend.lease_range(sandbox_id)
            except DSecError as error:
                errors += [error_body(error)] * (count - len(sandboxes))
                break
            spec = msgspec.structs.replace(
                plan, sandbox_id=sandbox_id, range_index=range_index, hostname=plan.hostname or f"{HOSTNAME}-{sandbox_id[-8:]}"
            )
            status = Status(
                created_at=now,
                ttl_running_stop=args.ttl_running_stop,
                ttl_max=args.ttl_max,
                ttl_paused_stop=args.ttl_paused_stop,
                labels=args.labels,
            )
            sandbox = Sandbox(spec, backend, status)
            sandboxes.append(sandbox)
            core.sandboxes[sandbox_id] = sandbox
        return sandboxes, errors

    async def _enter(self, sandboxes: list[Sandbox]) -> None:
        """On record before the first of them is launched, so that no kernel object is ever without a record."""
        journal = self._core.journal
        journal.add_sandboxes([sandbox.row() for sandbox in sandboxes])
        await journal.flush()

    async def _launch(self, sandbox: Sandbox) -> None:
        core = self._core
        core.launching += 1
        begun = clock.now()
        try:
            await self._bring_layers(sandbox)
            async with core.slots:
                if sandbox.status.state != "creating":
                    return
                channel = await sandbox.backend.create(sandbox.spec)
        except DSecError as error:
            sandbox.error = error
            core.counters["sandboxes_create_failed"] += 1
            core.apply(sandbox, LaunchFailed(_cause(error), error.message))
        except Exception as error:
            log.exception("a launch failed", sandbox_id=sandbox.id)
            core.counters["sandboxes_create_failed"] += 1
            sandbox.error = SandboxFailed(f"the launch failed: {error!r}", cause="launch-failed", ran="not-run")
            core.apply(sandbox, LaunchFailed("launch-failed", repr(error)))
        else:
            sandbox.channel = channel
            sandbox.status.create_ms = round((clock.now() - begun) * 1000, 3)
            core.counters["sandboxes_created"] += 1
            core.apply(sandbox, Launched())
        finally:
            core.launching -= 1

    async def _bring_layers(self, sandbox: Sandbox) -> None:
        try:
            await self._core.store.bring([layer.rpartition("@")[2] for layer in sandbox.spec.layers], sandbox.id)
        except DSecError:
            # What `_prepare` leased for it.
            await sandbox.backend.destroy(sandbox.spec)
            raise

    def _why(self, sandbox: Sandbox) -> DSecError:
        if sandbox.error is None and sandbox.status.state == "creating":
            return Overloaded("this node is shutting down", cause="draining")
        return sandbox.error or self._core.ended(sandbox, ran="not-run")


def _cause(error: DSecError) -> FailureCause:
    if isinstance(error, SandboxFailed) and error.cause in msgspec.inspect.type_info(FailureCause).values:  # type: ignore[attr-defined]
        return cast("FailureCause", error.cause)
    return "launch-failed"


def _as_error(body: ErrorBody) -> DSecError:
    return Overloaded(body.message, cause=body.cause)
