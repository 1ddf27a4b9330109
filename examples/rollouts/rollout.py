"""One rollout: a policy works in its sandbox, its changes are carried out, the verifier judges them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from libdsec import DSecError
from libdsec.sandbox import Sandbox

from .agent import Agent, HarnessLost, Step, ToolFailed
from .carry import Changes, Unacceptable, collect
from .layers import HARNESS
from .policies import Policy
from .policies.openai import EndpointFailed
from .screen import objections
from .task import Task
from .verdict import Expectation, Verdict, judge
from .verify import Samples, Verifier

__all__ = ["STAGES", "Outcome", "Rollout", "Stage"]

Stage = Literal["waiting", "acting", "verifying", "done", "failed"]
STAGES: tuple[Stage, ...] = ("waiting", "acting", "verifying", "done", "failed")


@dataclass(slots=True)
class Outcome:
    """What a rollout came to. `reward` is None where the trajectory failed; `reason` then is the cause."""

    index: int
    policy: str
    variant: str
    reward: float | None = None
    reason: str = ""
    verdict: Verdict | None = None
    left_behind: tuple[str, ...] = ()
    steps: list[Step] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)
    sandbox_id: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """What all rollouts share. `expectation` may still be at work while agents act."""

    task: Task
    pristine: Mapping[str, bytes]
    verifier: Verifier
    expectation: asyncio.Future[Expectation]
    tell: Callable[[int, Stage], None]

    async def perform(self, outcome: Outcome, sandbox: Sandbox, policy: Policy) -> Outcome:
        """Fill in the outcome. Whatever goes wrong with the sandbox or the policy is in it; the sandbox is stopped in any case."""
        started = time.monotonic()
        outcome.sandbox_id = sandbox.sandbox_id
        try:
            self.tell(outcome.index, "acting")
            changes = await self._act(outcome, sandbox, policy)
            self.tell(outcome.index, "verifying")
            await self._verify(outcome, changes)
        except Unacceptable as error:
            outcome.reward, outcome.reason = 0.0, f"not carried: {error}"
        except DSecError as error:
            outcome.reason = f"sandbox: {type(error).__name__}{f' ({error.cause})' if error.cause else ''}: {error.message}"
        except HarnessLost as error:
            outcome.reason = f"harness: {error}"
        except ToolFailed as error:
            outcome.reason = f"tool: {error}"
        except EndpointFailed as error:
            outcome.reason = f"endpoint: {error}"
        outcome.seconds = time.monotonic() - started
        self.tell(outcome.index, "failed" if outcome.reward is None else "done")
        return outcome

    async def _act(self, outcome: Outcome, sandbox: Sandbox, policy: Policy) -> Changes:
        async with sandbox:
            await outcome.samples.first_command(sandbox)
            process = await sandbox.start(["/usr/bin/python3", "-I", "-B", HARNESS], open_stdin=True, cwd=self.task.root)
            agent = Agent(process)
            outcome.steps = agent.steps
            try:
                await policy(agent)
                await agent.close()
            finally:
                await process.aclose()
            changes = await collect(sandbox.files, self.task.package_path, self.pristine)
            await outcome.samples.look(sandbox)
        outcome.left_behind = changes.left_behind
        return changes

    async def _verify(self, outcome: Outcome, changes: Changes) -> None:
        report = await self.verifier.report(changes, outcome.samples)
        verdict = judge(report, await asyncio.shield(self.expectation))
        objected = objections(changes.written, self.pristine)
        outcome.verdict = verdict
        outcome.reward = 0.0 if objected else verdict.reward
        outcome.reason = "; ".join(filter(None, [verdict.reason, f"screened: {', '.join(objected)}" if objected else ""]))
