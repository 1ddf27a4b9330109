"""The whole job: prepare, serve, 64 rollouts at once, verdicts, table, and the proof that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from libdsec import DSecClient

from .carry import Changes
from .daemon import make_run_folder, remove_run_folder, serving
from .leftovers import Leftovers, settle
from .policies import Episode, make
from .prepare import Prepared, prepare
from .progress import Progress
from .rollout import Outcome, Rollout
from .task import CACHETOOLS
from .verdict import Expectation
from .verify import Verifier

__all__ = ["AlreadyRunning", "Job", "JobResult"]

_LABELS = {"job": "rollouts"}


class AlreadyRunning(Exception):
    """Another job works on this state folder."""


@dataclass(slots=True)
class JobResult:
    """What the job came to."""

    outcomes: list[Outcome] = field(default_factory=list)
    expectation: Expectation | None = None
    leftovers: Leftovers = field(default_factory=Leftovers)
    seconds: dict[str, float] = field(default_factory=dict)
    run: str = ""


@dataclass(slots=True)
class Job:
    """Runs once. `policies` is the mix, dealt out in turn over `rollouts`."""

    state: Path
    rollouts: int
    policies: list[str]
    progress: Progress
    result: JobResult = field(default_factory=JobResult)

    async def run(self) -> JobResult:
        """All of it. Cancelled at any point it stops what it started and then raises; `result` says what was left even then."""
        self.state.mkdir(parents=True, exist_ok=True)
        with _only_one(self.state):
            run = await make_run_folder(self.state)
            self.result.run = str(run)
            try:
                with self._timed("prepare"):
                    prepared = await prepare(CACHETOOLS, self.state, self.progress.phase)
                self.progress.phase("starting dsec up")
                async with serving(self.state, run) as client:
                    with self._timed("rollouts"):
                        await self._rollouts(client, prepared)
                    self.progress.phase("stopping")
            finally:
                remove_run_folder(self.state, run)
                # Not in a thread: that would have to be waited for through a cancellation, and nothing else is left to do by now.
                self.result.leftovers = settle(self.state, run)
            self._keep_trajectories()
        return self.result

    async def _rollouts(self, client: DSecClient, prepared: Prepared) -> None:
        base, workspace = prepared.layers["rollouts-base"], prepared.layers["rollouts-workspace"]
        verifier = Verifier(
            client, prepared.task, (base, workspace, prepared.layers["rollouts-verifier"]), prepared.modules, labels=_LABELS
        )
        outcomes, policies = [], []
        for index in range(self.rollouts):
            name, variant = self.policies[index % len(self.policies)], index // len(self.policies)
            policy, words = make(name, Episode(prepared.task, prepared.fix, variant))
            outcomes.append(Outcome(index, name, words))
            policies.append(policy)
        self.result.outcomes = outcomes
        self.progress.expect(outcomes)
        self.progress.phase(f"{self.rollouts} sandboxes: create, act, verify")
        arguments = verifier.arguments((base, workspace, prepared.layers["rollouts-toolkit"]))
        with self._timed("create"):
            sandboxes = await client.run_many(arguments, count=self.rollouts)
        async with asyncio.TaskGroup() as group:
            # The two runs that say which tests count go along with the agents; only verdicts wait for them.
            fixed = Changes({name: text for name, text in prepared.fixed.items() if prepared.pristine.get(name) != text})
            expectation = group.create_task(verifier.expectation(fixed))
            shared = Rollout(prepared.task, prepared.pristine, verifier, expectation, self.progress.tell)
            for outcome, sandbox, policy in zip(outcomes, sandboxes, policies, strict=True):
                group.create_task(shared.perform(outcome, sandbox, policy))
        self.result.expectation = expectation.result()

    def _keep_trajectories(self) -> None:
        """One line a rollout, steps included, in the state folder."""
        with (self.state / "trajectories.jsonl").open("wb") as file:
            for outcome in self.result.outcomes:
                file.write(msgspec.json.encode(trajectory(outcome)) + b"\n")

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.result.seconds[name] = round(time.monotonic() - started, 3)


def trajectory(outcome: Outcome) -> dict[str, Any]:
    """A rollout as plain data."""
    return asdict(outcome)


@contextlib.contextmanager
def _only_one(state: Path) -> Iterator[None]:
    with (state / "job.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(f"another job works on {state}") from None
        yield
