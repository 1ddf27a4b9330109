"""Packs: what a sandbox has written becomes a layer while it goes on.

A pack is on record before the snapshot is taken, and again when it is there. What a restart finds before that was not begun and is
forgotten, its caller repeats it; what it finds after is finished from the snapshot, whether or not the sandbox lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import msgspec
import structlog

from dsec.backends.protocol import Backend
from dsec.edge.checks import check_pack
from dsec.edge.core import Core
from dsec.edge.ids import new_op_id
from dsec.edge.records import encode, error_body
from dsec.edge.recovery import rebooted
from dsec.edge.sandbox import Sandbox
from dsec.edge.snapshots import take_snapshot
from dsec.environments.manifest import Configuration
from dsec.environments.names import Reference
from dsec.environments.packing import Interrupted, Packed, PackPlan, StackLimits, pack_snapshot
from dsec.environments.residue import DEFAULT_RULES
from dsec.trajectory import PackRow
from libdsec.errors import Conflict, DSecError, NotFound, Overloaded, SandboxFailed, Unsupported
from libdsec.schema import BackendName, PackInfo, PackRequest

__all__ = ["Packs"]

log = structlog.get_logger("dsec.edge")
CLOSE_SECONDS = 10.0


class _Job(msgspec.Struct, kw_only=True, frozen=True):
    """What the journal keeps to go on with a pack."""

    snapshot: str
    backend: BackendName
    source: str
    layers: list[str]
    scrub: list[str]
    configuration: Configuration
    provenance: dict[str, str]


class _Pack:
    def __init__(self, info: PackInfo, request: bytes, job: _Job, backend: Backend) -> None:
        self.info = info
        self.request = request
        self.job = job
        self.backend = backend
        self.over = asyncio.Event()
        self.refused: DSecError | None = None
        """Why it was not begun."""


class Packs:
    """`recover` once at the start, before anything is swept; `aclose` interrupts what is under way, for the next start to finish."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._packs: dict[str, _Pack] = {}
        self._threads: set[threading.Thread] = set()
        self._slots = asyncio.Semaphore(core.settings.packs_at_once)
        self._closing = False

    # -- requests

    async def pack(self, sandbox_id: str, request: PackRequest, wait: float) -> PackInfo:
        """See Edge.pack_diff."""
        check_pack(request)
        core = self._core
        op_id = request.op_id or new_op_id()
        wanted = encode((sandbox_id, msgspec.structs.replace(request, op_id=op_id)))
        found = self._packs.get(op_id) or core.journal.pack(op_id)
        if found is not None:
            if found.request != wanted:
                raise Conflict("this op_id was used for another pack", field="op_id", cause="op-reused")
            return await self.get(op_id, wait)
        if core.draining:
            raise Overloaded("this node is shutting down", cause="draining")
        sandbox = core.living(sandbox_id)
        if not sandbox.backend.capabilities().snapshot:
            raise Unsupported(f"the backend {sandbox.spec.backend} cannot take snapshots on this host", field="backend")
        pack = self._packs[op_id] = _Pack(_begun(op_id, sandbox, request), wanted, _job(sandbox, request), sandbox.backend)
        beginning = core.spawn(self._begin(sandbox, pack))
        # Who leaves does not undo it: it has an id to ask by.
        await asyncio.shield(beginning)
        if pack.refused is not None:
            raise pack.refused
        return await self.get(op_id, wait)

    async def get(self, op_id: str, wait: float) -> PackInfo:
        """See Edge.pack_info."""
        pack = self._packs.get(op_id)
        if pack is None:
            row = self._core.journal.pack(op_id)
            if row is None:
                raise NotFound(f"there is no pack {op_id!r:.150}", field="op_id")
            return msgspec.msgpack.decode(row.info, type=PackInfo)
        if wait > 0 and not pack.over.is_set():
            try:
                async with asyncio.timeout(wait):
                    await pack.over.wait()
            except TimeoutError:
                pass
        if pack.refused is not None:
            raise pack.refused
        return pack.info

    # -- the work

    async def _begin(self, sandbox: Sandbox, pack: _Pack) -> None:
        """Until the snapshot is there and on record. A failure is the caller's, and nothing of it stays."""
        core, job = self._core, pack.job
        try:
            self._record(pack, "taking")
            await core.journal.flush()
            stopped_ms = await take_snapshot(core, sandbox, job.snapshot, branchable=False)
            try:
                pack.info.stopped_ms = round(stopped_ms, 3)
                # The sandbox holds its layers no longer than it lives.
                await core.in_thread(core.environments.acquire, job.layers, job.snapshot)
                self._record(pack, "packing")
                await core.journal.flush()
            except BaseException:
                await self._drop(pack)
                raise
        except BaseException as error:
            core.journal.forget_pack(pack.info.op_id)
            with contextlib.suppress(Overloaded):
                await core.journal.flush()
            del self._packs[pack.info.op_id]
            pack.refused = error if isinstance(error, DSecError) else DSecError(repr(error), cause="snapshot", ran="not-run")
            pack.over.set()
            if isinstance(error, DSecError):
                return
            raise
        core.spawn(self._finish(pack))

    async def _finish(self, pack: _Pack) -> None:
        core, info = self._core, pack.info
        try:
            async with self._slots:
                packed = await self._in_thread(pack)
        except Interrupted:
            return
        except Exception as error:
            if not isinstance(error, DSecError):
                log.exception("a pack failed", op_id=info.op_id, sandbox_id=info.sandbox_id)
                error = DSecError(f"the pack failed: {error!r}", cause="pack", ran="ran")
            info.error = error_body(error)
            state = "failed"
        else:
            _fill(info, packed)
            state = "published"
        info.state = state  # type: ignore[assignment]
        info.ended_at = time.time()
        info.total_ms = round((info.ended_at - info.created_at) * 1000, 3)
        core.counters[f"packs_{state}"] += 1
        self._record(pack, state)
        # On record before it is told, and before what a repetition would need is gone.
        await core.journal.flush()
        pack.over.set()
        await self._drop(pack)
        self._packs.pop(info.op_id, None)

    async def _in_thread(self, pack: _Pack) -> Packed:
        """One that no end of the process waits for: it reads and writes the store, which may stall for ever."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Packed] = loop.create_future()

        def settle(packed: Packed | None, error: BaseException | None) -> None:
            if over.done():
                return
            if packed is not None:
                over.set_result(packed)
            else:
                over.set_exception(error or Interrupted())

        def work() -> None:
            packed, failed = None, None
            try:
                packed = self._work(pack)
            except BaseException as error:
                failed = error
            # the loop may be gone by the time
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, packed, failed)

        thread = threading.Thread(target=work, name="store: pack", daemon=True)
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        thread.start()
        return await over

    def _work(self, pack: _Pack) -> Packed:
        core, job, info = self._core, pack.job, pack.info
        mounts = core.environments.acquire(job.layers, job.snapshot)
        plan = PackPlan(
            reference=Reference(info.name, tag=info.tag),
            kind=info.kind,
            source=job.source,
            layers=job.layers,
            scrub=job.scrub,
            configuration=job.configuration,
            provenance=job.provenance,
        )
        limits = StackLimits(core.settings.snapshot_layers, core.settings.snapshot_small_bytes)
        upper = pack.backend.snapshot_folder(job.snapshot)
        return pack_snapshot(core.environments, upper, [Path(mount) for mount in mounts], plan, limits, stop=lambda: self._closing)

    async def _drop(self, pack: _Pack) -> None:
        """The snapshot and the layers that were held for it. What cannot be removed now, the sweep removes."""
        core, name = self._core, pack.job.snapshot
        core.snapshots.discard(name)
        await core.in_thread(core.environments.release, name)
        await pack.backend.drop_snapshot(name)

    def _record(self, pack: _Pack, state: str) -> None:
        info = pack.info
        row = PackRow(info.op_id, info.sandbox_id, state, info.created_at, pack.request, encode(pack.job), encode(info))
        self._core.journal.put_pack(row)

    # -- start and end

    async def recover(self) -> None:
        """Go on with what has its snapshot, forget what has none yet. No snapshot outlives its host."""
        core = self._core
        lost = rebooted(core)
        there = {backend.name: await backend.snapshots() for backend in core.backends.values()}
        for row in core.journal.packs(under_way=True):
            info = msgspec.msgpack.decode(row.info, type=PackInfo)
            job = msgspec.msgpack.decode(row.plan, type=_Job)
            if row.state == "taking":
                core.journal.forget_pack(row.op_id)
                await core.in_thread(core.environments.release, job.snapshot)
            elif lost or job.snapshot not in there.get(job.backend, ()):
                info.state, info.ended_at = "failed", time.time()
                info.error = error_body(SandboxFailed("the snapshot was lost with its host", cause="node-lost", ran="ran"))
                core.journal.put_pack(row._replace(state="failed", info=encode(info)))
                await core.in_thread(core.environments.release, job.snapshot)
            else:
                core.snapshots.add(job.snapshot)
                pack = self._packs[row.op_id] = _Pack(info, row.request, job, core.backends[job.backend])
                core.spawn(self._finish(pack))
        await core.journal.flush()

    def interrupt(self) -> None:
        """What is under way stops soon, and is as it was after a crash."""
        self._closing = True

    async def aclose(self) -> None:
        """Interrupt, and wait until it has stopped; not for long, as the store may have stalled."""
        self.interrupt()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in list(self._threads):
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))


def _begun(op_id: str, sandbox: Sandbox, request: PackRequest) -> PackInfo:
    return PackInfo(
        op_id=op_id,
        sandbox_id=sandbox.id,
        name=request.name,
        tag=request.tag,
        kind=request.kind,
        state="packing",
        created_at=time.time(),
    )


def _job(sandbox: Sandbox, request: PackRequest) -> _Job:
    """The sandbox's own environment variables stay out: they are where secrets are."""
    spec = sandbox.spec
    return _Job(
        snapshot=f"pack-{new_op_id()}",
        backend=spec.backend,
        source=f"sandbox:{spec.sandbox_id}",
        layers=[layer.rpartition("@")[2] for layer in spec.layers],
        scrub=[*(DEFAULT_RULES if request.default_scrub else ()), *request.scrub],
        configuration=Configuration(workdir=spec.args.workdir, user=spec.args.init_user if spec.args.init_user != "root" else ""),
        provenance={
            "command": " ".join(["pack-diff", f"--kind={request.kind}", *(f"--scrub={rule}" for rule in request.scrub)]),
            "parent": spec.layers[-1],
            "sandbox": spec.sandbox_id,
            **({"forked_from": spec.parent} if spec.parent else {}),
        },
    )


def _fill(info: PackInfo, packed: Packed) -> None:
    manifest = packed.manifest
    info.digest = manifest.digest
    info.below = list(manifest.identity.below)
    info.files = manifest.contents.files
    info.metadata_bytes = manifest.identity.metadata.size
    info.logical_bytes = manifest.contents.logical_bytes
    info.data_bytes = manifest.contents.data_bytes
    info.new_bytes = manifest.contents.stored_bytes
    info.left_out = packed.scrubbed
    info.merged = packed.merged
