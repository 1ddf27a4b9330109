"""Running the checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from dsec.testing.checks import commands, files, forks, lifecycle, limits, ports, sessions, streams, walls
from dsec.testing.trial import CHECKS, Check, CheckFailed, CheckSkipped, Trial
from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import DSecError
from libdsec.schema import BackendName

__all__ = ["CheckOutcome", "check_names", "self_check"]

# Importing a module of checks registers them.
MODULES = (commands, streams, sessions, files, ports, lifecycle, forks, limits, walls)
CHECK_SECONDS = 60.0


class CheckOutcome(msgspec.Struct, kw_only=True, frozen=True):
    """How one check went. `detail` says what was seen where it did not hold, or why it could not be tried."""

    name: str
    verdict: Literal["passed", "failed", "skipped"]
    seconds: float
    detail: str = ""


def check_names() -> list[str]:
    """Of all checks, in the order in which they run."""
    return [check.name for check in CHECKS]


async def self_check(
    client: DSecClient,
    args: DSecContainerRunArgs,
    *,
    backend: BackendName = "container",
    only: Sequence[str] | None = None,
    on_outcome: Callable[[CheckOutcome], None] | None = None,
) -> list[CheckOutcome]:
    """Try the contract of a sandbox on sandboxes made from `args`; one outcome a check, never an exception of a check's.

    `args` names an environment with a POSIX shell and the usual small tools; busybox will do. `only` chooses by parts of names.
    Raises DSecError if not even a first sandbox can be made. Sandboxes are stopped on every way out.
    """
    chosen = [check for check in CHECKS if only is None or any(part in check.name for part in only)]
    capabilities = (await client.node()).capabilities
    outcomes: list[CheckOutcome] = []
    async with await client.run(args, backend=backend) as shared:
        trial = Trial(client, args, backend, shared)
        for check in chosen:
            outcome = await _run(check, trial, capabilities)
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
    return outcomes


async def _run(check: Check, trial: Trial, capabilities: dict[str, bool]) -> CheckOutcome:
    lacking = [need for need in check.needs if not capabilities.get(f"{trial.backend}.{need}", True)]
    if lacking:
        return CheckOutcome(name=check.name, verdict="skipped", seconds=0.0, detail=f"this node has no {', '.join(lacking)}")
    started = time.monotonic()
    verdict: Literal["passed", "failed", "skipped"] = "failed"
    detail = ""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await check.run(trial)
        verdict = "passed"
    except CheckSkipped as reason:
        verdict, detail = "skipped", str(reason)
    except CheckFailed as failure:
        detail = str(failure)
    except TimeoutError:
        detail = f"not done after {CHECK_SECONDS:g} s"
    except DSecError as error:
        detail = f"{type(error).__name__}: {error.message}"
    except Exception as error:  # one check's bug or surprise must not hide what the others find
        detail = f"unexpected {error!r}"
    return CheckOutcome(name=check.name, verdict=verdict, seconds=time.monotonic() - started, detail=detail)
