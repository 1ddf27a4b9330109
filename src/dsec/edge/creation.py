"""Creating sandboxes: checked, admitted, on record, then launched, a batch in one request.

A client that leaves before the answer leaves no sandbox behind.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import msgspec
import structlog

from dsec.backends.protocol import Backend, SandboxSpec
from dsec.edge import clock
from dsec.edge.admission import host_memory_mb
from dsec.edge.checks import check_create
from dsec.edge.core import Core
from dsec.edge.events import Launched, LaunchFailed, StopWanted
from dsec.edge.ids import new_sandbox_id
from dsec.edge.machine import Status
from dsec.edge.records import decode_errors, decode_ids, encode, info_from_row, sandbox_info
from dsec.edge.sandbox import Sandbox
from dsec.trajectory.rows import KeyRow
from libdsec.errors import Conflict, DSecError, InvalidArgument, Overloaded, SandboxFailed
from libdsec.schema import BatchResult, CreateRequest, ErrorBody, FailureCause, SandboxInfo

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
        self._cpu_count = float(cpu_count)
        self._memory_mb = host_memory_mb()
        self._keys: dict[str, asyncio.Future[None]] = {}

    async def create(self, request: CreateRequest, idempotency_key: str | None) -> BatchResult:
        """See Edge.create."""
        if idempotency_key is None:
            return await self._create(request, None)
        if not 1 <= len(idempotency_key) <= 128 or "\0" in idempotency_key:
            raise InvalidArgument("an idempotency key has 1 to 128 characters", field="Idempotency-Key")
        while (first := self._keys.get(idempotency_key)) is not None:
            await asyncio.shield(first)
        if (row := self._core.journal.key(idempotency_key)) is not None:
            return self._again(row, request)
        self._keys[idempotency_key] = asyncio.get_running_loop().create_future()
        try:
            result = await self._create(request, idempotency_key)
        except BaseException:
            # A repeat must not find the record of what is being undone: the key is free when the journal says so.
            self._core.journal.forget_key(idempotency_key)
            self._core.spawn(self._free(idempotency_key))
            raise
        self._keys.pop(idempotency_key).set_result(None)
        return result

    async def _free(self, key: str) -> None:
        try:
            await self._core.journal.flush()
        finally:
            self._keys.pop(key).set_result(None)

    def _again(self, row: KeyRow, request: CreateRequest) -> BatchResult:
        if row.request != encode(request):
            raise Conflict("this idempotency key was used for another create", field="Idempotency-Key", cause="key-reused")
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
        check_create(request, self._memory_mb)
        backend = core.backends.get(request.backend)
        if backend is None:
            raise InvalidArgument(f"this node has no backend {request.backend}, it has {', '.join(core.backends)}", field="backend")
        backend.validate(request.args)
        resolved = self._resolve(request)
        core.admission.admit(request.count, len(core.sandboxes), core.launching)
        sandboxes, errors = self._prepare(request, backend, resolved)
        try:
            await self._enter(sandboxes)
            for sandbox in sandboxes:
                sandbox.launch = core.spawn(self._launch(sandbox))
            if sandboxes:
                await asyncio.wait([sandbox.launch for sandbox in sandboxes if sandbox.launch is not None])
            made = [sandbox for sandbox in sandboxes if sandbox.status.state in ALIVE]
            errors += [_error_body(self._why(sandbox)) for sandbox in sandboxes if sandbox.status.state not in ALIVE]
            for sandbox in made:
                sandbox.status.told = True
                core.record(sandbox)
            if key is not None and made:
                core.journal.put_key(KeyRow(key, encode(request), encode([sandbox.id for sandbox in made]), encode(errors), clock.now()))
            # On record before anybody is told: what a restart finds untold, it removes.
            await core.journal.flush()
        except BaseException:
            for sandbox in sandboxes:
                core.apply(sandbox, StopWanted("requested"))
            raise
        if not made and request.count == 1:
            raise self._why(sandboxes[0]) if sandboxes else _as_error(errors[0])
        return BatchResult(sandboxes=[sandbox_info(sandbox.spec, sandbox.status) for sandbox in made], errors=errors)

    def _resolve(self, request: CreateRequest) -> ResolvedEnvironment:
        args = request.args
        if args.environment:
            return self._core.environments.resolve(args.environment)
        return self._core.environments.resolve([args.container_image], field="container_image")

    def _prepare(self, request: CreateRequest, backend: Backend, resolved: ResolvedEnvironment) -> tuple[list[Sandbox], list[ErrorBody]]:
        core = self._core
        args = request.args
        if args.cpu_cores_limit > self._cpu_count:
            args = msgspec.structs.replace(args, cpu_cores_limit=self._cpu_count)
        layers = [str(layer) for layer in resolved.layers]
        env = {**resolved.env, **args.env}
        now = clock.now()
        sandboxes: list[Sandbox] = []
        errors: list[ErrorBody] = []
        for _ in range(request.count):
            sandbox_id = new_sandbox_id(core.name)
            try:
                range_index = backend.lease_range(sandbox_id)
            except DSecError as error:
                errors += [_error_body(error)] * (request.count - len(sandboxes))
                break
            spec = SandboxSpec(
                sandbox_id=sandbox_id,
                generation=1,
                args=args,
                layers=layers,
                range_index=range_index,
                env=env,
                workdir=args.workdir or resolved.workdir or "/",
                user=args.init_user or resolved.user or "root",
                hostname=args.hostname or HOSTNAME,
                backend=request.backend,
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

    def _why(self, sandbox: Sandbox) -> DSecError:
        if sandbox.error is None and sandbox.status.state == "creating":
            return Overloaded("this node is shutting down", cause="draining")
        return sandbox.error or self._core.ended(sandbox, ran="not-run")


def _cause(error: DSecError) -> FailureCause:
    if isinstance(error, SandboxFailed) and error.cause in msgspec.inspect.type_info(FailureCause).values:  # type: ignore[attr-defined]
        return cast("FailureCause", error.cause)
    return "launch-failed"


def _error_body(error: DSecError) -> ErrorBody:
    return ErrorBody(code=error.code, message=error.message, ran=error.ran, field=error.field, cause=error.cause)


def _as_error(body: ErrorBody) -> DSecError:
    return Overloaded(body.message, cause=body.cause)
