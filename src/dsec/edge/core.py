"""The rim around the machines: feeds events in, performs what comes out, keeps the journal and the timers in step.

The parts of the edge (creation, lifecycle, operations, sessions, recovery, sweep) share one Core. All of it runs in one event loop and, but
for `await`, uninterrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from dsec.backends.protocol import Backend, Channel, ChannelEvent
from dsec.edge import clock
from dsec.edge.admission import Admission
from dsec.edge.events import CancelLaunch, Destroy, Event, InitDied, Lost, OomKilled, Pause, Record, Resume, ResumeWanted, Tick
from dsec.edge.machine import Machine
from dsec.edge.records import decode_sandbox, encode
from dsec.edge.sandbox import Sandbox
from dsec.edge.settings import EdgeSettings
from dsec.edge.storereads import FailedReads
from dsec.edge.storewatch import StoreWatch
from dsec.edge.timers import Timers
from dsec.trajectory import Journal
from libdsec.errors import DSecError, NotFound, Ran, SandboxFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec.environments import EnvironmentStore

__all__ = ["Core"]

log = structlog.get_logger("dsec.edge")
T = TypeVar("T")
CLOSE_SECONDS = 10.0


class Core:
    """State of the edge. The callbacks `pause`, `resume`, `destroy` and `session_ended` are set by the parts that own them."""

    pause: Callable[[Sandbox], Awaitable[None]]
    resume: Callable[[Sandbox], Awaitable[None]]
    destroy: Callable[[Sandbox], Awaitable[None]]
    session_ended: Callable[[Sandbox, str], None]

    def __init__(
        self, *, name: str, backends: dict[str, Backend], environments: EnvironmentStore, journal: Journal, settings: EdgeSettings
    ) -> None:
        self.name = name
        self.backends = backends
        self.environments = environments
        self.journal = journal
        self.settings = settings
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: set[str] = set()
        """Names of those in use. All others that a backend has are left over."""
        self.launching = 0
        self.admission = Admission(settings)
        self.timers = Timers(lambda sandbox: self.apply(sandbox, Tick()))
        self.threads = ThreadPoolExecutor(4, thread_name_prefix="dsec-edge")
        self.slots = asyncio.Semaphore(settings.launches_at_once)
        self.store = StoreWatch(self)
        self.failed_reads = FailedReads(self)
        self.draining = False
        self.counters: dict[str, int] = {
            "sandboxes_created": 0,
            "sandboxes_create_failed": 0,
            "sandboxes_stopped": 0,
            "sandboxes_failed": 0,
            "operations_started": 0,
            "operations_ended": 0,
            "operations_lost": 0,
            "operations_replayed": 0,
            "packs_published": 0,
            "packs_failed": 0,
            "swept": 0,
        }
        self._tasks: set[asyncio.Task[Any]] = set()

    def owners(self) -> set[str]:
        """Who holds layers: the sandboxes, and the snapshots that are being packed."""
        return set(self.sandboxes) | self.snapshots

    # -- events in, instructions out

    def apply(self, sandbox: Sandbox, event: Event) -> None:
        """Feed the machine and perform what it says."""
        for instruction in sandbox.machine.handle(event, clock.now()):
            match instruction:
                case Record():
                    self.record(sandbox)
                case CancelLaunch():
                    if sandbox.launch is not None:
                        sandbox.launch.cancel()
                case Pause():
                    self.chain(sandbox, self.pause)
                case Resume():
                    self.chain(sandbox, self.resume)
                case Destroy():
                    self.chain(sandbox, self.destroy)

    def record(self, sandbox: Sandbox) -> None:
        """Write its status and wake who waits for it to change."""
        status = sandbox.status
        self.journal.set_status(sandbox.id, status.state, status.clean, status.ended_at, encode(status))
        sandbox.wake()
        if sandbox.over:
            # From here on the journal answers for it. It must have the last word before memory forgets.
            self.spawn(self._forget(sandbox))
        else:
            self.timers.watch(sandbox)

    async def _forget(self, sandbox: Sandbox) -> None:
        while True:
            try:
                await self.journal.flush()
                break
            except DSecError:
                await asyncio.sleep(1)
        if self.sandboxes.get(sandbox.id) is sandbox:
            del self.sandboxes[sandbox.id]

    def unremoved(self) -> list[Sandbox]:
        """All of which this host may still hold something, whatever their state."""
        return [sandbox for sandbox in self.sandboxes.values() if not sandbox.over]

    def chain(self, sandbox: Sandbox, work: Callable[[Sandbox], Awaitable[None]]) -> None:
        """Run `work` after whatever the backend is doing with this sandbox: its calls are serialised."""
        before = sandbox.work or sandbox.launch

        async def run() -> None:
            if before is not None and not before.done():
                await asyncio.wait([before])
            await work(sandbox)

        sandbox.work = self.spawn(run())

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the edge's own, which no client's leaving cancels. Its failure is logged."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the edge failed", exc_info=error)

    async def settle_tasks(self) -> None:
        """At the end: removals under way get some seconds; what remains is finished by the next start, from the journal."""
        removals = [sandbox.work for sandbox in self.sandboxes.values() if sandbox.work is not None and sandbox.machine.destroying]
        if removals:
            await asyncio.wait(removals, timeout=CLOSE_SECONDS)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=CLOSE_SECONDS)

    def on_backend_event(self, sandbox_id: str, event: ChannelEvent) -> None:
        """What a backend tells of a sandbox."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.over:
            return
        match event.kind:
            case "session-ended":
                if event.session_id is not None:
                    self.session_ended(sandbox, event.session_id)
            case "oom":
                self.apply(sandbox, OomKilled(event.detail))
            case "init-died":
                self.apply(sandbox, InitDied(event.detail))
            case "closed":
                self.apply(sandbox, Lost("channel-closed", event.detail))

    # -- finding and using

    def find(self, sandbox_id: str) -> Sandbox | None:
        """A sandbox that is not over, or None where the journal has it; NotFound where nobody has."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None and self.journal.sandbox(sandbox_id) is None:
            raise NotFound(f"there is no sandbox {sandbox_id!r:.150}", field="sandbox_id")
        return sandbox

    def living(self, sandbox_id: str) -> Sandbox:
        """A sandbox that is not over; else the typed error that says how it ended."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is not None:
            return sandbox
        row = self.journal.sandbox(sandbox_id)
        if row is None:
            raise NotFound(f"there is no sandbox {sandbox_id!r:.150}", field="sandbox_id")
        raise Machine(decode_sandbox(row)[1]).refusal()

    async def usable(self, sandbox: Sandbox) -> Channel:
        """Wait for, or wake, the sandbox; returns the way in. Raises what the state says where it cannot be used."""
        resumed = False
        while True:
            match sandbox.machine.outcome("use"):
                case "do":
                    assert sandbox.channel is not None, "what runs has a channel"
                    return sandbox.channel
                case "resume":
                    if resumed and sandbox.error is not None:
                        raise sandbox.error
                    resumed = True
                    self.apply(sandbox, ResumeWanted())
            await asyncio.shield(sandbox.changed())

    def begin_activity(self, sandbox: Sandbox) -> None:
        """The idle clock stands until `end_activity`."""
        sandbox.machine.begin_activity()

    def end_activity(self, sandbox: Sandbox) -> None:
        """The idle clock goes on, if this was the last activity."""
        sandbox.machine.end_activity(clock.now())
        if sandbox.timer is None:
            self.timers.watch(sandbox)

    @contextmanager
    def activity(self, sandbox: Sandbox) -> Iterator[None]:
        """Use of the sandbox for as long as the block runs."""
        sandbox.machine.begin_activity()
        try:
            yield
        finally:
            self.end_activity(sandbox)

    def ended(self, sandbox: Sandbox, *, ran: Ran) -> SandboxFailed:
        """What a command is told that the end of its sandbox overtook."""
        status = sandbox.status
        if status.state == "failed":
            detail = f": {status.detail}" if status.detail else ""
            return SandboxFailed(f"the sandbox failed ({status.cause}){detail}", cause=status.cause, ran=ran)
        return SandboxFailed(f"the sandbox was stopped ({status.stop_reason}) meanwhile", cause="stopped", ran=ran)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in the edge's own small pool."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)
