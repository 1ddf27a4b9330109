"""What a check is given, and how it says that something does not hold."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import DSecError
from libdsec.sandbox import Sandbox
from libdsec.schema import BackendName

__all__ = ["CHECKS", "Check", "CheckFailed", "CheckSkipped", "Trial", "check", "equal", "eventually", "holds", "refused"]

PATIENCE_SECONDS = 10.0


class CheckFailed(Exception):
    """The contract does not hold; the text says what was seen."""


class CheckSkipped(Exception):
    """It cannot be tried here; the text says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """`needs` names capabilities of the node without which it is skipped."""

    name: str
    run: Callable[[Trial], Awaitable[None]]
    needs: tuple[str, ...]


CHECKS: list[Check] = []


def check(*needs: str) -> Callable[[Callable[[Trial], Awaitable[None]]], Callable[[Trial], Awaitable[None]]]:
    """Register an async function as a check; its name, with hyphens, is the check's."""

    def register(function: Callable[[Trial], Awaitable[None]]) -> Callable[[Trial], Awaitable[None]]:
        CHECKS.append(Check(function.__name__.replace("_", "-"), function, needs))
        return function

    return register


class Trial:
    """One run of the suite: the client, what sandboxes are made of, and one sandbox that checks share which leave no trace in it."""

    def __init__(self, client: DSecClient, args: DSecContainerRunArgs, backend: BackendName, shared: Sandbox) -> None:
        self.client = client
        self.args = args
        self.backend = backend
        self.shared = shared

    @contextlib.asynccontextmanager
    async def sandbox(self, **changes: Any) -> AsyncIterator[Sandbox]:
        """A sandbox of this check's own, stopped at the end."""
        async with await self.client.run(msgspec.structs.replace(self.args, **changes), backend=self.backend) as made:
            yield made

    async def shell(self, command: str, **options: Any) -> str:
        """What the command prints in the shared sandbox; it must exit with 0."""
        result = await self.shared.run_shell(command, **options)
        if result.exit_code != 0:
            raise CheckFailed(f"{command!r} ended with {result.exit_code}, signal {result.signal}: {result.stderr[-300:]!r}")
        return result.stdout.decode(errors="surrogateescape")

    async def has(self, program: str) -> bool:
        """Whether the image brings it."""
        return (await self.shared.run_shell(f"command -v {program}")).exit_code == 0


def holds(condition: object, what: str) -> None:
    """CheckFailed with `what` was seen unless it holds."""
    if not condition:
        raise CheckFailed(what)


def equal(seen: object, expected: object, what: str) -> None:
    """CheckFailed unless they are equal."""
    if seen != expected:
        raise CheckFailed(f"{what}: {seen!r:.200} instead of {expected!r:.200}")


async def refused(work: Awaitable[object], *kinds: type[DSecError], field: str | None = None) -> DSecError:
    """The error that `work` raises: one of `kinds`, not run, naming `field` if given."""
    try:
        seen = await work
    except kinds as error:
        if field is not None and error.field != field:
            raise CheckFailed(f"the error names {error.field!r}, not {field!r}: {error.message}") from error
        equal(error.ran, "not-run", f"{type(error).__name__}.ran")
        return error
    except DSecError as error:
        raise CheckFailed(f"{type(error).__name__} instead of {kinds[0].__name__}: {error.message}") from error
    raise CheckFailed(f"was not refused: {seen!r:.200}")


async def eventually(what: str, condition: Callable[[], Awaitable[object]], seconds: float = PATIENCE_SECONDS) -> None:
    """Ask until it holds; CheckFailed at the deadline."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise CheckFailed(f"not so after {seconds:g} s: {what}")
        await asyncio.sleep(0.02)
