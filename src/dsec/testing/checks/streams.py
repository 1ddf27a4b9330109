"""Processes: live streams, terminals, signals, and finding them again."""

from __future__ import annotations

import asyncio

from dsec.testing.trial import CheckFailed, CheckSkipped, Trial, check, equal, eventually, holds
from libdsec.process import Process
from libdsec.schema import ExecResult

__all__: list[str] = []


async def _until(process: Process, text: bytes, seconds: float = 10.0) -> bytes:
    """Output up to and with `text`."""
    seen = b""
    try:
        async with asyncio.timeout(seconds):
            async for _, data in process.output():
                seen += data
                if text in seen:
                    return seen
    except TimeoutError:
        raise CheckFailed(f"{text!r} did not come within {seconds:g} s; came: {seen[-200:]!r}") from None
    raise CheckFailed(f"the output ended without {text!r}: {seen[-200:]!r}")


async def _ended(process: Process) -> ExecResult:
    async with asyncio.timeout(20):
        return await process.wait()


@check()
async def output_comes_while_it_runs(trial: Trial) -> None:
    async with await trial.shared.start(shell="echo ready; read line; echo got $line", open_stdin=True) as process:
        await _until(process, b"ready\n")
        await process.write_stdin(b"word\n")
        await _until(process, b"got word\n")
        equal((await _ended(process)).exit_code, 0, "exit code")


@check()
async def stdin_can_be_closed_alone(trial: Trial) -> None:
    async with await trial.shared.start(["cat"], open_stdin=True) as process:
        await process.write_stdin(b"one")
        await process.write_stdin(b"two")
        await process.close_stdin()
        result = await _ended(process)
        equal((result.exit_code, result.stdout), (0, b"onetwo"), "outcome")


@check("tty")
async def a_terminal_is_one_and_resizes(trial: Trial) -> None:
    if not await trial.has("stty"):
        raise CheckSkipped("the image has no stty")
    async with await trial.shared.start(
        shell="test -t 0 && stty size; read x; stty size; read x", open_stdin=True, tty=True, rows=33, cols=77
    ) as process:
        await _until(process, b"33 77")
        await process.resize(40, 100)
        await process.write_stdin(b"\n")
        await _until(process, b"40 100")


@check()
async def a_background_process_outlives_its_request(trial: Trial) -> None:
    async with await trial.shared.start(shell="echo started; exec sleep 60", background=True) as process:
        found = await trial.shared.process(process.op_id)
        await _until(found, b"started\n")
        equal((await found.info()).state, "running", "state")
    result = await _ended(process)
    equal(result.signal, 9, "signal")


@check()
async def output_is_kept_for_who_comes_later(trial: Trial) -> None:
    process = await trial.shared.start(shell="echo first; echo second; exit 3")
    await _ended(process)
    found = await trial.shared.process(process.op_id)
    result = await _ended(found)
    equal((result.exit_code, result.stdout), (3, b"first\nsecond\n"), "the record")


@check()
async def signals_reach_the_leader_or_the_tree(trial: Trial) -> None:
    async with await trial.shared.start(shell="trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done") as process:
        await _until(process, b"ready\n")
        await process.signal("TERM")
        result = await _ended(process)
        equal((result.exit_code, b"caught" in result.stdout), (5, True), "outcome")


@check()
async def processes_are_listed(trial: Trial) -> None:
    async with await trial.shared.start(["sleep", "60"]) as process:
        listed = {each.op_id: each for each in await trial.shared.processes()}
        holds(process.op_id in listed, "the process is in the list")
        equal(listed[process.op_id].argv, ["sleep", "60"], "argv")

    async def ended() -> bool:
        return (await process.info()).state == "exited"

    await eventually("a killed process is listed as exited", ended)
