"""Runs the newer release's tests over an agent's changes, in a fresh sandbox that the agent never saw.

The sandbox is made of the same base and workspace and of a layer with the tests; no toolkit, nothing of the agent's sandbox but the
carried files. The supervisor in it is root, the tested code is nobody, and neither has a network.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.sandbox import Sandbox

from .canaries import draw
from .carry import Changes
from .layers import SUPERVISOR, TESTS
from .task import Task
from .verdict import Expectation, Report, parse

__all__ = ["Samples", "Verifier"]


@dataclass(slots=True)
class Samples:
    """Measurements of one rollout's sandboxes, for the table. Milliseconds and bytes."""

    create_ms: list[float] = field(default_factory=list)
    exec_ms: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0

    async def look(self, sandbox: Sandbox) -> None:
        """Take the sandbox's own numbers before it is stopped."""
        info = await sandbox.info()
        if info.create_ms is not None:
            self.create_ms.append(info.create_ms)
        self.peak_memory_bytes = max(self.peak_memory_bytes, info.memory_peak_bytes or 0)

    async def first_command(self, sandbox: Sandbox) -> None:
        """One `true`, timed from here."""
        started = time.perf_counter()
        await sandbox.exec(["/bin/true"], timeout=60)
        self.exec_ms.append((time.perf_counter() - started) * 1000)


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies changes of one task. `layers` are the base, the workspace and the tests, by digest."""

    client: DSecClient
    task: Task
    layers: tuple[str, ...]
    modules: tuple[str, ...]
    """Names of the test modules, e.g. `tests.test_lru`."""
    seconds: float = 120.0
    labels: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, layers: tuple[str, ...]) -> DSecContainerRunArgs:
        """What this job's sandboxes are made with."""
        return DSecContainerRunArgs(
            environment=list(layers),
            memory_limit_mb=512,
            cpu_cores_limit=1.0,
            pids_limit=256,
            disk_limit_mb=512,
            ttl_max=900.0,
            network="none",
            labels=dict(self.labels),
        )

    async def report(self, changes: Changes, samples: Samples) -> Report:
        """What the tests said of the changes. Raises `DSecError` where the sandbox failed: that is no verdict."""
        async with await self.client.run_container(self.arguments(self.layers)) as sandbox:
            await samples.first_command(sandbox)
            await self._apply(sandbox, changes)
            canaries = draw()
            nonce, token = secrets.token_hex(16), secrets.token_hex(16)
            plan = {
                "nonce": nonce,
                "token": token,
                "files": {f"{name}.py": text for name, text in canaries.modules.items()},
                "path": [TESTS, self.task.import_root],
                "modules": canaries.among(self.modules),
                "seconds": self.seconds,
            }
            result = await sandbox.exec(
                ["/usr/bin/python3", "-I", "-S", "-B", SUPERVISOR],
                stdin=json.dumps(plan).encode(),
                user="root",
                cwd="/",
                timeout=self.seconds + 30,
            )
            await samples.look(sandbox)
        return parse(result.stdout, result.exit_code, nonce=nonce, token=token, canaries=canaries.expected)

    async def _apply(self, sandbox: Sandbox, changes: Changes) -> None:
        folder = self.task.package_path
        for parent in sorted({name.rpartition("/")[0] for name in changes.written} - {""}):
            await sandbox.files.mkdir(f"{folder}/{parent}", parents=True)
        for name, content in changes.written.items():
            await sandbox.files.write(f"{folder}/{name}", content, mode=0o644)
        for name in changes.removed:
            await sandbox.files.remove(f"{folder}/{name}")

    async def expectation(self, fixed: Changes) -> Expectation:
        """Find which tests the fix turns and which pass either way, by running both. Raises ValueError if it turns none."""
        before, after = await asyncio.gather(self.report(Changes(), Samples()), self.report(fixed, Samples()))
        for release, report in ((self.task.old, before), (self.task.new, after)):
            if report.faults:
                raise ValueError(f"the tests do not run on {release.folder}: {'; '.join(report.faults)}\n{report.log}")
        passed_before = {name for name, outcome in before.outcomes.items() if outcome == "passed"}
        passed_after = {name for name, outcome in after.outcomes.items() if outcome == "passed"}
        turned = frozenset(passed_after - passed_before)
        if not turned:
            raise ValueError(f"no test fails on {self.task.old.folder} and passes on {self.task.new.folder}")
        everything = frozenset(before.outcomes.keys() | after.outcomes.keys())
        return Expectation(turned, frozenset(passed_after & passed_before), everything - passed_after)
