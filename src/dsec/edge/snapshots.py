"""Taking a snapshot of a live sandbox, in turn with all else that its backend does with it."""

from __future__ import annotations

import asyncio

from dsec.edge.core import Core
from dsec.edge.sandbox import Sandbox
from libdsec.errors import DSecError

__all__ = ["drop_snapshot", "take_snapshot"]


async def take_snapshot(core: Core, sandbox: Sandbox, name: str, *, branchable: bool) -> float:
    """Keep its disk as of a moment between now and the return; how many milliseconds its processes stood.

    `name` is held in `core.snapshots`, which spares it from the sweep, until `drop_snapshot`; nothing stays after an error or a
    cancellation.
    """
    while sandbox.machine.outcome("snapshot") == "wait":
        await asyncio.shield(sandbox.changed())
    taken: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def take(sandbox: Sandbox) -> None:
        try:
            sandbox.machine.outcome("snapshot")
            stopped_ms = await sandbox.backend.snapshot(
                sandbox.spec, name, branchable=branchable, hurry=lambda: sandbox.machine.destroying or core.draining
            )
        except BaseException as error:
            if not taken.done():
                taken.set_exception(_typed(error))
            if not isinstance(error, Exception):
                raise
        else:
            if taken.done():
                await sandbox.backend.drop_snapshot(name)
            else:
                taken.set_result(stopped_ms)

    core.snapshots.add(name)
    try:
        with core.activity(sandbox):
            core.chain(sandbox, take)
            return await taken
    except BaseException:
        core.snapshots.discard(name)
        raise


async def drop_snapshot(core: Core, sandbox: Sandbox, name: str) -> None:
    """Remove it. What cannot be removed now, the sweep removes."""
    core.snapshots.discard(name)
    await sandbox.backend.drop_snapshot(name)


def _typed(error: BaseException) -> DSecError:
    if isinstance(error, DSecError):
        return error
    return DSecError(f"the snapshot could not be taken: {error!r}", cause="snapshot", ran="not-run")
