"""A sandbox's states and its end."""

from __future__ import annotations

import asyncio
import time

from dsec.testing.trial import CheckFailed, Trial, check, equal, eventually, holds
from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound, SandboxFailed
from libdsec.sandbox import Sandbox

__all__: list[str] = []


@check()
async def stopping_twice_gives_one_answer(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        first, second = await asyncio.gather(sandbox.stop(), sandbox.stop())
        third = await sandbox.stop()
        for info in (first, second, third):
            equal((info.state, info.stop_reason), ("stopped", "requested"), "state and reason")
        equal(first.ended_at, third.ended_at, "time of its end")
        await _gone(sandbox)


async def _gone(sandbox: Sandbox) -> None:
    try:
        await sandbox.run_shell("true")
    except (SandboxFailed, NotFound, Conflict) as error:
        equal(error.ran, "not-run", "ran")
    else:
        raise CheckFailed("a command ran in a stopped sandbox")


@check()
async def a_running_command_ends_with_its_sandbox(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        running = asyncio.ensure_future(sandbox.run_shell("sleep 60"))
        await asyncio.sleep(0.1)
        await sandbox.stop()
        try:
            async with asyncio.timeout(10):
                result = await running
        except DSecError:
            return  # the sandbox failed under it, which is told too
        holds(result.signal is not None, f"it ended with {result.exit_code}")


@check("pause")
async def a_paused_sandbox_stands_still(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        await sandbox.start(shell="while :; do date +%s%N >>/tmp/ticks 2>/dev/null || date >>/tmp/ticks; sleep 0.02; done", background=True)

        async def ticking() -> bool:
            try:
                return len(await sandbox.files.read("/tmp/ticks")) > 0
            except NotFound:
                return False

        await eventually("the counter runs", ticking)
        equal((await sandbox.pause()).state, "paused", "state")
        before = (await sandbox.info()).cpu_seconds
        await asyncio.sleep(0.4)
        after = (await sandbox.info()).cpu_seconds
        equal(after, before, "CPU seconds over a pause")
        equal((await sandbox.resume()).state, "running", "state")
        size = len(await sandbox.files.read("/tmp/ticks"))

        async def grown() -> bool:
            return len(await sandbox.files.read("/tmp/ticks")) > size

        await eventually("the counter goes on", grown)


@check("pause")
async def a_command_for_a_paused_sandbox_has_an_outcome(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        await sandbox.pause()
        try:
            async with asyncio.timeout(10):
                result = await sandbox.run_shell("echo awake")
        except Conflict as error:
            equal(error.ran, "not-run", "ran")
        else:
            equal(result.stdout, b"awake\n", "a request resumes it")


@check("pause")
async def a_paused_sandbox_can_be_stopped(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        await sandbox.pause()
        async with asyncio.timeout(15):
            equal((await sandbox.stop()).state, "stopped", "state")


@check()
async def an_idle_sandbox_is_stopped(trial: Trial) -> None:
    async with trial.sandbox(ttl_running_stop=1.0) as sandbox:
        result = await sandbox.run_shell("sleep 2; echo done")
        equal(result.stdout, b"done\n", "a running command is activity")
        ended = time.monotonic()

        async def stopped() -> bool:
            return (await sandbox.info()).state == "stopped"

        await eventually("it is stopped when idle", stopped, 15)
        holds(time.monotonic() - ended > 0.7, "not before its idle time")
        equal((await sandbox.info()).stop_reason, "idle", "reason")


@check()
async def bad_sandboxes_are_refused_by_name(trial: Trial) -> None:
    cases: list[tuple[dict[str, object], tuple[str, ...]]] = [
        ({"environment": ["no-such-environment"], "container_image": ""}, ("environment", "container_image")),
        ({"memory_limit_mb": 0}, ("memory_limit_mb",)),
        ({"cpu_cores_limit": -1.0}, ("cpu_cores_limit",)),
        ({"ttl_running_stop": -5.0}, ("ttl_running_stop",)),
        ({"pids_limit": 0}, ("pids_limit",)),
        ({"env": {"A=B": "x"}}, ("env",)),
    ]
    for changes, fields in cases:
        try:
            async with trial.sandbox(**changes):
                pass
        except (InvalidArgument, NotFound) as error:
            holds(error.field in fields, f"{changes}: the error names {error.field!r}, not {fields[0]!r}")
            equal(error.ran, "not-run", "ran")
        else:
            raise CheckFailed(f"{changes} was taken")


@check()
async def labels_find_sandboxes(trial: Trial) -> None:
    mark = str(time.time_ns())
    async with trial.sandbox(labels={"self-check": mark}) as sandbox:
        found = [info.sandbox_id for info in await trial.client.list(labels={"self-check": mark})]
        equal(found, [sandbox.sandbox_id], "by label")
        equal((await (await trial.client.get(sandbox.sandbox_id)).info()).labels, {"self-check": mark}, "labels")


@check()
async def the_story_is_told(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        await sandbox.stop()
        story = (await sandbox.info()).story
        holds(story, "there is a story")
        equal((story[0].before, story[-1].after), ("creating", "stopped"), "from and to")
