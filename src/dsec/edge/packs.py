"""Packs: what a sandbox has written becomes a layer while it goes on.

A pack is on record before the snapshot is taken, and again when it is there. What a restart finds before that was not begun and is
forgotten, its caller repeats it; what it finds after is finished from the snapshot, whether or not the sandbox lives. How often its process
was started is on record, too: whatever makes it die is not tried for ever.

Packs to one tag are made one after the other, in the order of their snapshots: it ends at the latest moment.
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
from dsec.environments.packing import Packed, PackPlan, StackLimits
from dsec.environments.packprocess import PackDied, PackJob, PackProcess
from dsec.environments.residue import DEFAULT_RULES
from dsec.trajectory import PackRow
from libdsec.errors import Conflict, DSecError, NotFound, Overloaded, SandboxFailed, Unsupported
from libdsec.schema import BackendName, PackInfo, PackRequest

__all__ = ["Packs"]

log = structlog.get_logger("dsec.edge")
CLOSE_SECONDS = 10.0
STARTS = 3
"""How often a pack's process may die."""
RETRY_SECONDS = 1.0


class _Interrupted(Exception):
    """This process ends: the next one finishes the pack."""


class _Job(msgspec.Struct, kw_only=True, frozen=True):
    """What the journal keeps to go on with a pack."""

    snapshot: str
    backend: BackendName
    source: str
    layers: list[str]
    scrub: list[str]
    configuration: Configuration
    provenance: dict[str, str]
    moment: float = 0.0
    """When the snapshot was there. Of two, one is greater."""
    starts: int = 0
    """How often its process was started and not told to end."""


class _Pack:
    def __init__(self, info: PackInfo, request: bytes, job: _Job, backend: Backend) -> None:
        self.info = info
        self.request = request
        self.job = job
        self.backend = backend
        self.over = asyncio.Event()
        self.refused: DSecError | None = None
        """Why it was not begun."""
        self.before: _Pack | None = None
        """Of the same tag."""
        self.process: PackProcess | None = None


class Packs:
    """`recover` once at the start, before anything is swept; `aclose` interrupts what is under way, for the next start to finish."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._packs: dict[str, _Pack] = {}
        self._threads: set[threading.Thread] = set()
        self._slots = asyncio.Semaphore(core.settings.packs_at_once)
        self._latest: dict[tuple[str, str], _Pack] = {}
        """By name and tag."""
        self._moment = 0.0
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
        if len(self._packs) >= core.settings.packs_most:
            # Each keeps what its sandbox has deleted or changed since on the disk that all share.
            raise Overloaded(f"{len(self._packs)} packs are under way or wait for their turn on this node", cause="packs")
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
            self._record(pack, "taking", pack.info)
            await core.journal.flush()
            stopped_ms = await take_snapshot(core, sandbox, job.snapshot, branchable=False)
            try:
                pack.info.stopped_ms = round(stopped_ms, 3)
                self._line_up(pack)
                # The sandbox holds its layers no longer than it lives.
                await core.in_thread(core.environments.acquire, job.layers, job.snapshot)
                self._record(pack, "packing", pack.info)
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
            self._leave_line(pack)
            if isinstance(error, DSecError):
                return
            raise
        core.spawn(self._finish(pack))

    def _line_up(self, pack: _Pack) -> None:
        """After those of the same tag whose snapshots were there before. The clock may be set back, moments are not."""
        self._moment = max(pack.job.moment or time.time(), self._moment + 1e-6)
        pack.job = msgspec.structs.replace(pack.job, moment=self._moment)
        tag = (pack.info.name, pack.info.tag)
        pack.before = self._latest.get(tag)
        self._latest[tag] = pack

    def _leave_line(self, pack: _Pack) -> None:
        tag = (pack.info.name, pack.info.tag)
        if self._latest.get(tag) is pack:
            del self._latest[tag]
            if pack.before is not None:
                self._latest[tag] = pack.before

    async def _finish(self, pack: _Pack) -> None:
        before = pack.before
        while before is not None:
            # One that could not begin is over before those that it waited for.
            await before.over.wait()
            before = before.before
        ended = msgspec.structs.replace(pack.info)
        try:
            async with self._slots:
                _fill(ended, await self._made(pack))
            ended.state = "published"
        except _Interrupted:
            return
        except Exception as error:
            if not isinstance(error, DSecError):
                log.exception("a pack failed", op_id=ended.op_id, sandbox_id=ended.sandbox_id)
                error = DSecError(f"the pack failed: {error!r}", cause="pack", ran="ran")
            ended = msgspec.structs.replace(pack.info, state="failed", error=error_body(error))
        ended.ended_at = time.time()
        ended.total_ms = round((ended.ended_at - ended.created_at) * 1000, 3)
        await self._end(pack, ended)

    async def _end(self, pack: _Pack, ended: PackInfo) -> None:
        """Whatever it came to, nobody waits for it longer, and nothing is kept for it."""
        core = self._core
        try:
            self._record(pack, ended.state, ended)
        except Exception as error:
            log.exception("the end of a pack could not be recorded", op_id=ended.op_id)
            told = DSecError(f"the end of the pack could not be recorded: {error!r:.500}", cause="pack", ran="ran")
            ended = msgspec.structs.replace(
                pack.info, state="failed", error=error_body(told), ended_at=ended.ended_at, total_ms=ended.total_ms
            )
            self._record(pack, "failed", ended)
        # On record before it is told, and before what a repetition would need is gone.
        await self._recorded()
        core.counters[f"packs_{ended.state}"] += 1
        pack.info = ended
        pack.over.set()
        pack.before = None
        self._leave_line(pack)
        try:
            await self._drop(pack)
        except Exception as error:
            log.warning("a snapshot could not be dropped", snapshot=pack.job.snapshot, error=repr(error))
        finally:
            self._packs.pop(ended.op_id, None)

    async def _recorded(self) -> None:
        """Until the journal has taken it: a disk that is full may have room again."""
        while True:
            try:
                await self._core.journal.flush()
                return
            except Overloaded:
                await asyncio.sleep(RETRY_SECONDS)

    async def _made(self, pack: _Pack) -> Packed:
        """Each start of its process is on record before it."""
        while pack.job.starts < STARTS:
            pack.job = msgspec.structs.replace(pack.job, starts=pack.job.starts + 1)
            self._record(pack, "packing", pack.info)
            await self._recorded()
            try:
                return await self._in_thread(pack)
            except PackDied as error:
                log.warning("a pack's process died", op_id=pack.info.op_id, starts=pack.job.starts, error=str(error))
        raise DSecError(f"the pack was begun {STARTS} times, and died each time with its process", cause="pack-died", ran="ran")

    async def _in_thread(self, pack: _Pack) -> Packed:
        """One that no end of this process waits for: the store may stall for ever."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Packed] = loop.create_future()

        def settle(packed: Packed | None, error: BaseException | None) -> None:
            if over.done():
                return
            if packed is not None:
                over.set_result(packed)
            else:
                over.set_exception(error or _Interrupted())

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
        process = pack.process = PackProcess(
            PackJob(
                state=str(core.environments.state.absolute()),
                store=str(core.environments.layers.root.absolute()),
                upper=str(pack.backend.snapshot_folder(job.snapshot).absolute()),
                mounts=[str(Path(mount).absolute()) for mount in mounts],
                plan=plan,
                limits=StackLimits(core.settings.snapshot_layers, core.settings.snapshot_small_bytes),
                memory_bytes=core.settings.pack_memory_bytes,
            )
        )
        if self._closing:
            raise _Interrupted
        try:
            return process.run()
        except PackDied:
            if self._closing:
                raise _Interrupted from None
            raise
        finally:
            pack.process = None

    async def _drop(self, pack: _Pack) -> None:
        """The snapshot and the layers that were held for it. What cannot be removed now, the sweep removes."""
        core, name = self._core, pack.job.snapshot
        core.snapshots.discard(name)
        await core.in_thread(core.environments.release, name)
        await pack.backend.drop_snapshot(name)

    def _record(self, pack: _Pack, state: str, info: PackInfo) -> None:
        row = PackRow(info.op_id, info.sandbox_id, state, info.created_at, pack.request, encode(pack.job), encode(info))
        self._core.journal.put_pack(row)

    # -- start and end

    async def recover(self) -> None:
        """Go on with what has its snapshot, forget what has none yet. No snapshot outlives its host."""
        core = self._core
        lost = rebooted(core)
        there = {backend.name: await backend.snapshots() for backend in core.backends.values()}
        going_on: list[_Pack] = []
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
                going_on.append(pack)
        for pack in sorted(going_on, key=lambda pack: pack.job.moment):
            self._line_up(pack)
            core.spawn(self._finish(pack))
        await core.journal.flush()

    def interrupt(self) -> None:
        """What is under way ends at once, and is as it was after a crash, but that nobody holds it against the pack."""
        if self._closing:
            return
        self._closing = True
        for pack in self._packs.values():
            if (process := pack.process) is not None:
                pack.job = msgspec.structs.replace(pack.job, starts=pack.job.starts - 1)
                self._record(pack, "packing", pack.info)
                process.kill()

    async def aclose(self) -> None:
        """Interrupt, and wait until it has ended; not for long, as the store may have stalled."""
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
        configuration=Configuration(workdir=spec.args.workdir, user=spec.args.init_user),
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
