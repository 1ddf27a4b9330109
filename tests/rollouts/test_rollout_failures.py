"""What goes wrong with a sandbox or a policy is a failed trajectory with its cause, never a silent zero."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

import pytest

from examples.rollouts.agent import Agent, HarnessLost, ToolFailed
from examples.rollouts.carry import Unacceptable
from examples.rollouts.policies.openai import EndpointFailed
from examples.rollouts.rollout import Outcome, Rollout, Stage
from examples.rollouts.task import CACHETOOLS
from examples.rollouts.verdict import Expectation
from libdsec import Overloaded, SandboxFailed


class Broken:
    """A sandbox of which one call raises."""

    sandbox_id = "sb-local-1"

    def __init__(self, error: Exception) -> None:
        self.error, self.stopped = error, 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stopped += 1

    async def exec(self, argv: list[str], **_: Any) -> None:
        raise self.error


async def _perform(sandbox: Any, policy: Callable[[Agent], Awaitable[None]]) -> tuple[Outcome, list[Stage]]:
    stages: list[Stage] = []
    expectation: asyncio.Future[Expectation] = asyncio.get_running_loop().create_future()
    shared = Rollout(CACHETOOLS, {}, None, expectation, lambda _, stage: stages.append(stage))  # type: ignore[arg-type]
    return await shared.perform(Outcome(0, "idle", ""), sandbox, policy), stages


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SandboxFailed("the memory limit was hit", cause="oom"), "sandbox: SandboxFailed (oom): the memory limit was hit"),
        (Overloaded("no room"), "sandbox: Overloaded: no room"),
        (HarnessLost("the harness ended"), "harness: the harness ended"),
        (ToolFailed("x is not a file"), "tool: x is not a file"),
        (EndpointFailed("HTTP 500"), "endpoint: HTTP 500"),
    ],
)
async def test_a_failure_is_told_with_its_cause_and_the_sandbox_is_stopped(error: Exception, reason: str) -> None:
    sandbox = Broken(error)
    outcome, stages = await _perform(sandbox, lambda _: asyncio.sleep(0))
    assert (outcome.reward, outcome.reason, outcome.sandbox_id) == (None, reason, "sb-local-1")
    assert stages == ["acting", "failed"]
    assert sandbox.stopped == 1


async def test_a_hostile_tree_earns_nothing_and_is_no_failure() -> None:
    outcome, stages = await _perform(Broken(Unacceptable("keys.py is a fifo")), lambda _: asyncio.sleep(0))
    assert (outcome.reward, outcome.reason) == (0.0, "not carried: keys.py is a fifo")
    assert stages == ["acting", "done"]
