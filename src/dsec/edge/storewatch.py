"""A store that stalls, vanishes or is damaged: it holds up nothing here, and the sandboxes that it fails are told.

Whatever may wait for the store is asked in a thread of its own, in which no other work of the edge ever queues behind it. Reads that the
server of packs could not serve in time fail the sandbox whose read it was; where EROFS reads the store itself, the packs in use are looked
at from time to time instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from dsec.edge.events import Lost
from dsec.environments.deadlines import within, within_async
from libdsec.errors import DSecError, SandboxFailed

if TYPE_CHECKING:
    from dsec.edge.core import Core
    from dsec.edge.sandbox import Sandbox
    from dsec.environments import ResolvedEnvironment
    from dsec.environments.blobcache import PackEvent, PackServerStatus

__all__ = ["StoreWatch"]

log = structlog.get_logger("dsec.edge")
T = TypeVar("T")

LOOK_SECONDS: Final = 0.5
SLOW_LOOK_SECONDS: Final = 5.0
DEAD_LOOKS: Final = 4
MUTE_LOOKS: Final = 40
BRING_AT_ONCE: Final = 16
OPEN_SECONDS: Final = 20.0
LOOK_LIMIT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Loss:
    """Reads of somebody fail. No `owners`: of everybody whose layers are read through the server."""

    detail: str
    owners: frozenset[str] | None


class StoreWatch:
    """`call`, `resolve` and `bring` ask the store; `run` watches it and never ends."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._access = core.environments.access
        self._bringing = asyncio.Semaphore(BRING_AT_ONCE)
        self._after = 0
        self._silent = 0
        self._failing_since: float | None = None
        self.status: PackServerStatus | None = None
        """As last seen; None where no server serves."""

    async def open(self) -> None:
        """Find out how the store is reached, before anybody is served: later nobody should wait for that."""
        await within_async(OPEN_SECONDS, "which way", lambda: self._access.direct)

    # -- asking

    async def call(self, function: Callable[..., T], *args: object, patience_seconds: float | None = None) -> T:
        """Do something that may wait for the store for ever. SandboxFailed(cause="store-lost") if it has not ended in time."""
        seconds = patience_seconds if patience_seconds is not None else self._access.settings.patience_seconds
        try:
            return await within_async(seconds, function.__name__, lambda: function(*args))
        except TimeoutError as error:
            raise SandboxFailed(str(error), cause="store-lost", ran="not-run") from None

    async def resolve(self, references: list[str], field: str) -> ResolvedEnvironment:
        """What the references mean. A store on a local disk is asked here and now: that is quicker than any thread."""
        environments = self._core.environments
        if self._access.direct:
            return environments.resolve(references, field=field)
        return await self.call(lambda: environments.resolve(references, field=field))

    async def bring(self, digests: list[str], owner: str) -> None:
        """See that layers are mounted, before anything is held for the launch that needs them: else a slow store would hold up others.

        What it raises is that of `EnvironmentStore.acquire`.
        """
        environments = self._core.environments
        if not environments.absent(digests):
            return
        async with self._bringing:
            if environments.absent(digests):
                # It keeps deadlines itself, one after the other.
                await self.call(environments.acquire, digests, owner, patience_seconds=4 * self._access.settings.patience_seconds)

    # -- watching

    async def run(self) -> None:
        """Looks, until cancelled."""
        while True:
            await asyncio.sleep(SLOW_LOOK_SECONDS if self._access.direct else LOOK_SECONDS)
            try:
                for loss in await self.call(self._look, patience_seconds=LOOK_LIMIT_SECONDS):
                    self._fail(loss)
            except DSecError as error:
                log.warning("the store could not be looked at", error=error.message)
            except Exception:
                log.exception("a look at the store failed")

    def _fail(self, loss: _Loss) -> None:
        core = self._core
        owners = set(core.sandboxes) if loss.owners is None else loss.owners
        for owner in sorted(owners):
            if (sandbox := core.sandboxes.get(owner)) is not None:
                self.fail(sandbox, loss.detail)

    def fail(self, sandbox: Sandbox, detail: str) -> None:
        """The sandbox has lost its store. Nothing happens to one that is at its end already."""
        if sandbox.status.state not in ("stopping", "stopped", "failed"):
            log.warning("a sandbox lost its store", sandbox_id=sandbox.id, detail=detail)
            self._core.apply(sandbox, Lost("store-lost", detail))

    def _look(self) -> list[_Loss]:
        if self._access.direct:
            return self._look_at_files()
        if not self._access.mounted():
            self.status = None
            return []
        try:
            self._after, events = self._access.events(self._after)
            self.status = self._access.status()
        except OSError as error:
            return self._silence(error)
        self._silent = 0
        return [loss for event in events if (loss := self._judge(event)) is not None]

    def _silence(self, error: OSError) -> list[_Loss]:
        """A worker that was killed is replaced within a moment; only where its keeper died with it are its mounts dead."""
        self._silent += 1
        # One that is there and does not answer is given the time after which the kernel itself would take it for dead.
        if self._silent < (MUTE_LOOKS if isinstance(error, TimeoutError) else DEAD_LOOKS):
            return []
        self._silent = 0
        self._after = 0
        self.status = None
        log.error("the server of packs is dead, its mounts are made anew", error=repr(error))
        self._core.environments.node.renew()
        return [_Loss("the server that reads the store for it died", None)]

    def _judge(self, event: PackEvent) -> _Loss | None:
        detail = f"the pack {event.pack[7:19]} could not be read: {event.reason}"
        parts = [part for part in event.group.split("/") if part]
        if not parts:
            return _Loss(detail, frozenset(self._users([event.pack])))
        return _Loss(detail, frozenset(parts))

    def _users(self, packs: Iterable[str]) -> set[str]:
        """Who uses a layer that needs one of `packs`."""
        wanted, environments = set(packs), self._core.environments
        users: set[str] = set()
        for digest, owners in environments.node.uses().items():
            with contextlib.suppress(DSecError, OSError, TimeoutError):
                identity = within(LOOK_SECONDS * 4, digest, lambda digest=digest: environments.layers.manifest(digest)).identity  # type: ignore[misc]
                if wanted & {use.digest for use in identity.packs}:
                    users |= owners
        return users

    def _look_at_files(self) -> list[_Loss]:
        """A pack that is shorter than it was is read as zeros by the kernel; a store that is away for too long is taken for lost."""
        uses = self._core.environments.node.uses()
        if not uses:
            self._failing_since = None
            return []
        try:
            flawed = within(SLOW_LOOK_SECONDS, "a look at its packs", lambda: self.flaws(uses))
        except (OSError, DSecError) as error:
            since = self._failing_since = self._failing_since or time.monotonic()
            if time.monotonic() - since < self._access.settings.patience_seconds:
                return []
            return [_Loss(f"the store does not answer: {error}", frozenset(set().union(*uses.values())))]
        self._failing_since = None
        return flawed

    def flaws(self, uses: dict[str, set[str]]) -> list[_Loss]:
        """Packs of these layers, each with its owners, that became shorter. OSError or DSecError where the store cannot be asked."""
        layers = self._core.environments.layers
        # Its folder first: packs that cannot be seen because nothing is mounted there are not lost yet.
        layers.packs.folder.stat()
        losses: list[_Loss] = []
        for digest, owners in uses.items():
            for use in layers.manifest(digest).identity.packs:
                # Of one that was removed the kernel still holds the bytes.
                with contextlib.suppress(FileNotFoundError):
                    if (size := layers.packs.data(use.digest).stat().st_size) < use.size:
                        losses.append(_Loss(f"the pack {use.digest[7:19]} has {size} bytes instead of {use.size}", frozenset(owners)))
        return losses

    def metrics(self) -> dict[str, float]:
        """Of the server of packs, as last seen; none where none serves."""
        status = self.status
        if status is None:
            return {}
        return {
            "store_away_seconds": status.away_ms / 1000,
            "store_reads_total": status.store_reads,
            "store_read_bytes_total": status.store_bytes,
            "store_errors_total": status.store_errors,
            "packs_asked_bytes_total": status.asked_bytes,
            "packs_cache_bytes": status.cache_bytes,
            "packs_cached_bytes_total": status.disk_bytes,
            "packs_waiting": status.waiting,
        }
