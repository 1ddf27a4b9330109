"""The container backend: dsec.backends.protocol.Backend over the launcher, cgroups, shared layers and scratch folders of one node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from dsec._native import native_binary
from dsec.backends.container import wire
from dsec.backends.container.birth import Host, launch_payload, layers_payload, limits_of
from dsec.backends.container.channel import ContainerChannel
from dsec.backends.container.conversation import connect
from dsec.backends.container.frames import encode_frame
from dsec.backends.container.launcher import Launcher
from dsec.backends.container.removal import Remains, stop
from dsec.backends.container.threads import ahead_of_others, begun_in_thread, in_pool, in_thread
from dsec.backends.container.watch import Watch
from dsec.backends.protocol import Capabilities, ChannelEvent, EventCallback, SandboxSpec, Usage
from dsec.environments.scratch import ScratchCapabilities
from dsec.environments.snapshots import ScratchSnapshots, forget_seeds
from dsec.isolation.walls import masked_here
from dsec.network.nat import NatNetwork
from dsec.resources.cgroups import CgroupDriver
from dsec.resources.hierarchies import WANTED, probe
from dsec.resources.plan import instance_name
from dsec.resources.uid_ranges import UidRanges
from libdsec.errors import DSecError, InvalidArgument, SandboxFailed, Unsupported
from libdsec.schema import BackendName, ContainerRunArgs

__all__ = ["ContainerBackend", "Layers", "ScratchFolders"]

READY_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 5.0
COPIES_AT_ONCE: Final = 4
"""Snapshots being taken: what is written out for one takes as long as its disk does."""
MIN_MEMORY_MB: Final = 8
MIN_PIDS: Final = 4
MIN_CPU_CORES: Final = 0.01

log = structlog.get_logger("dsec.container")


class Layers(Protocol):
    """Where mounted layers come from (dsec.environments.EnvironmentStore)."""

    def acquire(self, digests: Sequence[str], owner: str) -> list[str]: ...
    def release(self, owner: str) -> None: ...


class ScratchFolders(Protocol):
    """Where writable folders come from (dsec.environments.ScratchStore)."""

    @property
    def capabilities(self) -> ScratchCapabilities: ...
    @property
    def snapshots(self) -> ScratchSnapshots: ...
    def open(self) -> None: ...
    def close(self) -> None: ...
    def folder(self, sandbox_id: str) -> Path: ...
    def create(self, sandbox_id: str, limit_bytes: int | None, *, like: Path | None = None) -> Path: ...
    def destroy(self, sandbox_id: str) -> None: ...
    def usage(self, sandbox_id: str) -> int | None: ...
    def list(self) -> set[str]: ...
    def tidy(self) -> None: ...


class ContainerBackend:
    """Sandboxes of the instance whose run folder is `run`. `open` before use; `aclose` lets go and ends nothing but the launcher.

    Every call that may wait for the kernel runs in a thread; what a sandbox costs the event loop is a few frames.
    """

    name: BackendName = "container"

    def __init__(self, layers: Layers, scratch: ScratchFolders, run: Path, *, binary: Path | None = None) -> None:
        self._layers = layers
        self._scratch = scratch
        self._run = run
        self._sockets = run / "sandboxes"
        instance = instance_name(run)
        self._cgroups = CgroupDriver(probe(), instance)
        self._nat = NatNetwork(instance)
        self._ranges = UidRanges(run)
        self._launcher = Launcher(binary or native_binary(), run / "launcher.log", self._cgroups.daemons_dir)
        self._host = Host(len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), masked_here())
        self._copies = ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="dsec-copy")
        self._channels: dict[str, ContainerChannel] = {}
        self._paused: set[str] = set()
        self._births = 0
        self._on_event: EventCallback = _ignore
        self._nat_refusal: str | None = None

    async def open(self, on_event: EventCallback) -> None:
        self._on_event = on_event
        await in_thread(self._open)
        await self._launcher.begin()

    def _open(self) -> None:
        self._sockets.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._scratch.open()
        self._cgroups.prepare()
        self._ranges.open()
        self._nat_refusal = self._nat.probe()

    async def aclose(self) -> None:
        for channel in self._channels.values():
            await channel.aclose()
        self._channels.clear()
        await self._launcher.aclose()
        await in_thread(self._close)

    def _close(self) -> None:
        # What has not ended when the edge's tasks had their time waits for a disk that may never answer.
        ending = threading.Thread(target=self._copies.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        self._ranges.close()
        self._nat.retire()
        self._cgroups.retire()
        self._scratch.close()

    def capabilities(self) -> Capabilities:
        hierarchies = self._cgroups.hierarchies
        return Capabilities(
            pause=hierarchies.v2 is not None or hierarchies.has("freezer"),
            snapshot=self._can_snapshot(),
            fork=self._can_snapshot(),
            tty=True,
            nat=self._nat_refusal is None,
            disk_limit=self._scratch.capabilities.disk_limit,
            memory_limit=hierarchies.has("memory"),
        )

    def _can_snapshot(self) -> bool:
        hierarchies = self._cgroups.hierarchies
        return self._scratch.capabilities.snapshot and (hierarchies.v2 is not None or hierarchies.has("freezer"))

    def validate(self, args: ContainerRunArgs) -> None:
        """Refuses what this host cannot do, naming the field."""
        if args.memory_limit_mb < MIN_MEMORY_MB:
            raise InvalidArgument(f"memory_limit_mb must be at least {MIN_MEMORY_MB}, not {args.memory_limit_mb}", field="memory_limit_mb")
        if not args.cpu_cores_limit >= MIN_CPU_CORES:
            raise InvalidArgument(f"cpu_cores_limit must be at least {MIN_CPU_CORES}, not {args.cpu_cores_limit}", field="cpu_cores_limit")
        if args.pids_limit < MIN_PIDS:
            raise InvalidArgument(f"pids_limit must be at least {MIN_PIDS}, not {args.pids_limit}", field="pids_limit")
        fields = dict(zip(WANTED, ("cpu_cores_limit", "memory_limit_mb", "pids_limit"), strict=True))
        for controller, field in fields.items():
            if not self._cgroups.hierarchies.has(controller):
                raise Unsupported(f"this host has no {controller} cgroup controller", field=field)
        if args.network == "nat" and self._nat_refusal is not None:
            raise Unsupported(f"network nat: {self._nat_refusal}", field="network")
        if not self._scratch.capabilities.disk_limit:
            raise Unsupported("this host's scratch store has no quotas", field="disk_limit_mb")
        most = self._scratch.capabilities.size_bytes >> 20
        # A default is not refused: on a small disk it is no limit.
        if most < args.disk_limit_mb != ContainerRunArgs().disk_limit_mb:
            message = f"disk_limit_mb is {args.disk_limit_mb}, allowed is up to {most} MB of disk that this host has for sandboxes"
            raise InvalidArgument(message, field="disk_limit_mb")

    def lease_range(self, sandbox_id: str) -> int:
        return self._ranges.lease(sandbox_id)

    def _socket_path(self, sandbox_id: str) -> str:
        return str(self._sockets / f"{sandbox_id}.sock")

    def _watch(self, sandbox_id: str, sock: socket.socket) -> Watch:
        def report(event: ChannelEvent) -> None:
            self._on_event(sandbox_id, event)

        return Watch(asyncio.get_running_loop(), sock, self._socket_path(sandbox_id), report)

    async def create(self, spec: SandboxSpec) -> ContainerChannel:
        """A launcher that dies takes births with it that it has not begun; those are tried a second time."""
        starts = self._launcher.starts
        try:
            return await self._attempt(spec)
        except SandboxFailed as error:
            died = self._launcher.died() or 0 < starts < self._launcher.starts
            if error.cause != "launch-failed" or not died or not self._ranges.claim(spec.range_index, spec.sandbox_id):
                raise
        try:
            return await self._attempt(spec)
        except SandboxFailed as error:
            if error.cause == "launch-failed" and self._launcher.starts > starts and self._launcher.died():
                raise self._launcher.dying() from error
            raise

    async def _attempt(self, spec: SandboxSpec) -> ContainerChannel:
        try:
            return await self._create(spec)
        except Exception as error:
            await self._undo(spec, error)
            if isinstance(error, DSecError):
                raise
            raise SandboxFailed(f"{spec.sandbox_id} could not be made: {error}", cause="launch-failed", ran="not-run") from error
        except BaseException as error:
            await self._undo(spec, error)
            raise

    async def _undo(self, spec: SandboxSpec, error: BaseException) -> None:
        """Remove what a failed or cancelled create made. A cancellation does not cut this short: what stays would be nobody's."""
        ending = asyncio.ensure_future(self._end(spec.sandbox_id, spec.range_index))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError, DSecError):
                await asyncio.shield(ending)
        if not ending.cancelled() and (left := ending.exception()) is not None:
            error.add_note(f"and its removal failed: {left}")

    async def _create(self, spec: SandboxSpec) -> ContainerChannel:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        watch = self._watch(spec.sandbox_id, ours)
        # A birth that is alone goes on at both ends: aether begins while layers are mounted and scratch is made, which it needs late. Among
        # many, all CPUs have something to do, and one wait less is better.
        self._births += 1
        alone = self._births == 1
        preparing: asyncio.Future[list[str]] | None = None
        birth: socket.socket | None = None
        try:
            with theirs:
                if alone:
                    # Before the thread begins, which would want the interpreter, too.
                    await self._launcher.launch(self._payload(spec, []), theirs)
                    birth = ours.dup()
                preparing = begun_in_thread(self._prepare, spec, birth)
                if not alone:
                    await self._launcher.launch(self._payload(spec, await asyncio.shield(preparing)), theirs)
            await asyncio.shield(preparing)
            await self._ready(spec, watch)
        except BaseException:
            # What is undone next must not still be in the making.
            if preparing is not None:
                await _settled(preparing)
            if birth is not None:
                birth.close()
            await _settled(asyncio.ensure_future(watch.give_up()))
            raise
        finally:
            self._births -= 1
        channel = ContainerChannel(self._socket_path(spec.sandbox_id), watch)
        self._channels[spec.sandbox_id] = channel
        return channel

    def _payload(self, spec: SandboxSpec, layers: Sequence[str]) -> bytes:
        return launch_payload(
            spec,
            host=self._host,
            plan=self._cgroups.plan(spec.sandbox_id, limits_of(spec, self._host)),
            layers=layers,
            scratch=str(self._scratch.folder(spec.sandbox_id)),
            socket_path=self._socket_path(spec.sandbox_id),
            resolv_conf=self._nat.resolv_conf() if spec.args.network == "nat" else None,
        )

    async def _ready(self, spec: SandboxSpec, watch: Watch) -> None:
        try:
            async with asyncio.timeout(READY_SECONDS):
                ready = await asyncio.shield(watch.ready)
            if spec.args.network == "nat":
                await in_thread(self._nat.attach, spec.sandbox_id, spec.range_index, ready.number(wire.T_INIT_PID))
        except TimeoutError:
            message = f"{spec.sandbox_id} was not ready in {READY_SECONDS:.0f} s"
            raise SandboxFailed(message, cause="launch-failed", ran="not-run") from None
        except DSecError as error:
            if error.code != DSecError.code and error.cause != "channel-closed":
                raise
            raise SandboxFailed(error.message, cause="launch-failed", ran="not-run", details=error.details) from error

    def _prepare(self, spec: SandboxSpec, birth: socket.socket | None) -> list[str]:
        """The layers' mounted roots, from the bottom. The scratch folder is there on return.

        Who waits at the other end of `birth` is told at once: the way by the event loop would take two turns more. `birth` is closed.
        """
        if birth is None:
            return self._prepared(spec, contextlib.nullcontext())
        with birth:
            # A sandbox in the making waits for its scratch folder, and would else take the CPU from it.
            layers = self._prepared(spec, ahead_of_others())
            # Whether it has ended is seen by the watch, and nothing else has been sent that the socket's buffer could be full of.
            with contextlib.suppress(OSError):
                birth.send(encode_frame(wire.LAYERS, layers_payload(layers)))
            return layers

    def _prepared(self, spec: SandboxSpec, hurry: contextlib.AbstractContextManager[None]) -> list[str]:
        digests = [layer.rpartition("@")[2] for layer in spec.layers]
        layers = self._layers.acquire(digests, spec.sandbox_id)
        if not spec.snapshot:
            like = Path(layers[-1]) if spec.renewed else None
            with hurry:
                self._scratch.create(spec.sandbox_id, spec.args.disk_limit_mb << 20, like=like)
        elif not self._scratch.folder(spec.sandbox_id).exists():
            for error in self._branch(spec.snapshot, [spec]).values():
                raise error
        return layers

    async def adopt(self, spec: SandboxSpec) -> ContainerChannel | None:
        """None too where another sandbox holds its id range or another generation answers: neither is ours to run commands in."""
        sandbox_id = spec.sandbox_id
        if not self._ranges.claim(spec.range_index, sandbox_id):
            return None
        path = self._socket_path(sandbox_id)
        watch: Watch | None = None
        try:
            watch = self._watch(sandbox_id, await connect(path))
            watch.send(encode_frame(wire.HELLO))
            async with asyncio.timeout(READY_SECONDS):
                ready = await asyncio.shield(watch.ready)
                await asyncio.shield(watch.sessions)
        except (DSecError, TimeoutError) as error:
            if watch is not None:
                watch.close()
            log.info("not adopted", sandbox_id=sandbox_id, reason=str(error))
            return None
        if ready.text(wire.T_SANDBOX_ID) != sandbox_id or ready.number(wire.T_GENERATION) != spec.generation:
            watch.close()
            return None
        if await in_thread(self._cgroups.frozen, sandbox_id):
            self._paused.add(sandbox_id)
        channel = ContainerChannel(path, watch)
        self._channels[sandbox_id] = channel
        return channel

    async def pause(self, spec: SandboxSpec) -> None:
        """All its processes stand on return; aether does not, so files stay readable and output already written can be fetched."""
        # Noted first: an end that comes while it freezes has to thaw.
        self._paused.add(spec.sandbox_id)
        try:
            await in_thread(self._cgroups.freeze, spec.sandbox_id)
        except Exception:
            # Some of its processes may stand. It is held to run, and a snapshot of what runs has to freeze it.
            with contextlib.suppress(OSError, DSecError):
                await in_thread(self._cgroups.thaw, spec.sandbox_id)
            self._paused.discard(spec.sandbox_id)
            raise

    async def resume(self, spec: SandboxSpec) -> None:
        if spec.sandbox_id not in self._paused:
            return
        await in_thread(self._cgroups.thaw, spec.sandbox_id)
        self._paused.discard(spec.sandbox_id)

    async def snapshot(self, spec: SandboxSpec, name: str, *, branchable: bool, hurry: Callable[[], bool] | None = None) -> float:
        if not self._can_snapshot():
            raise Unsupported("this host cannot take snapshots: its scratch store is not on btrfs, or it has no cgroup freezer")
        return await in_pool(self._copies, partial(self._snapshot, spec, name, branchable, hurry or (lambda: False)))

    def _snapshot(self, spec: SandboxSpec, name: str, branchable: bool, hurry: Callable[[], bool]) -> float:
        """All that takes long is done before the processes stand and after."""
        sandbox_id, snapshots = spec.sandbox_id, self._scratch.snapshots
        stopped_ms = 0.0
        if sandbox_id in self._paused:
            snapshots.take(sandbox_id, name, read_only=not branchable)
        else:
            with snapshots.flushed(sandbox_id, hurry):
                stopped_ms = self._take_standing(sandbox_id, name, read_only=not branchable)
        if branchable:
            try:
                lowers = self._layers.acquire([layer.rpartition("@")[2] for layer in spec.layers], sandbox_id)
                snapshots.branchable(name, lambda upper: forget_seeds(upper, [Path(lower) for lower in reversed(lowers)]))
            except BaseException:
                snapshots.drop(name)
                raise
        return stopped_ms

    def _take_standing(self, sandbox_id: str, name: str, *, read_only: bool) -> float:
        """Whoever has a CPU meanwhile, this is what a sandbox waits for."""
        with ahead_of_others():
            began = time.monotonic()
            try:
                self._cgroups.freeze(sandbox_id)
                self._scratch.snapshots.take(sandbox_id, name, read_only=read_only)
            finally:
                self._cgroups.thaw(sandbox_id)
            return (time.monotonic() - began) * 1000

    async def branch(self, name: str, specs: Sequence[SandboxSpec]) -> dict[str, Exception]:
        return await in_pool(self._copies, partial(self._branch, name, specs))

    def _branch(self, name: str, specs: Sequence[SandboxSpec]) -> dict[str, Exception]:
        return self._scratch.snapshots.branch(name, {spec.sandbox_id: spec.args.disk_limit_mb << 20 for spec in specs})

    def snapshot_folder(self, name: str) -> Path:
        return self._scratch.snapshots.path(name) / "upper"

    async def drop_snapshot(self, name: str) -> None:
        await in_thread(self._scratch.snapshots.drop, name)

    async def snapshots(self) -> set[str]:
        return await in_thread(self._scratch.snapshots.names)

    async def tidy(self) -> None:
        await in_thread(self._scratch.tidy)

    async def destroy(self, spec: SandboxSpec) -> None:
        # Not yet ours where edge came back only to finish an end: nobody else may have the ids while they are in use.
        self._ranges.claim(spec.range_index, spec.sandbox_id)
        await self._end(spec.sandbox_id, spec.range_index)

    async def destroy_unknown(self, sandbox_id: str) -> None:
        await self._end(sandbox_id, None)

    async def _end(self, sandbox_id: str, range_index: int | None) -> None:
        channel = self._channels.get(sandbox_id)
        remains = Remains(sandbox_id, self._socket_path(sandbox_id), self._cgroups, self._nat, self._scratch, self._layers)
        if channel is None or sandbox_id in self._paused:
            # Frozen processes do not die of v1's SIGKILL, and aether would wait for them.
            await in_thread(remains.thaw)
        if channel is not None:
            channel.silence()
        stopped = await stop(remains.socket_path)
        await in_thread(remains.clear, stopped)
        if channel is not None:
            await channel.aclose()
        self._channels.pop(sandbox_id, None)
        self._paused.discard(sandbox_id)
        if range_index is not None:
            self._ranges.release(range_index, sandbox_id)

    async def usage(self, spec: SandboxSpec) -> Usage:
        return await in_thread(self._usage, spec.sandbox_id)

    def _usage(self, sandbox_id: str) -> Usage:
        memory, peak, oom_kills = self._cgroups.memory(sandbox_id)
        return Usage(
            memory_bytes=memory,
            memory_peak_bytes=peak,
            cpu_seconds=self._cgroups.cpu_seconds(sandbox_id),
            disk_bytes=self._scratch.usage(sandbox_id),
            oom_kills=oom_kills,
            pids=self._cgroups.pids(sandbox_id),
        )

    async def owned(self) -> set[str]:
        return await in_thread(self._owned)

    def _owned(self) -> set[str]:
        sockets = {path.name.removesuffix(".sock") for path in self._sockets.glob("*.sock")}
        return sockets | self._cgroups.owned() | self._nat.owned() | self._scratch.list()


def _ignore(sandbox_id: str, event: ChannelEvent) -> None:
    """Before `open` there is nobody to tell."""


async def _settled(work: asyncio.Future[Any]) -> None:
    """When it has ended, however; no cancellation cuts this short."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()
