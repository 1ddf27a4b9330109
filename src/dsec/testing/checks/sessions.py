"""Shell sessions."""

from __future__ import annotations

from dsec.testing.checks.commands import LONG, processes
from dsec.testing.trial import Trial, check, equal, eventually, holds

__all__: list[str] = []


@check()
async def a_session_keeps_folder_and_environment(trial: Trial) -> None:
    async with await trial.shared.open_session(env={"GIVEN": "yes"}) as session:
        await session.run("cd /tmp; export KEPT=1; shout() { echo loud; }")
        result = await session.run("pwd; echo $KEPT $GIVEN; shout")
        equal(result.stdout.decode().splitlines(), ["/tmp", "1 yes", "loud"], "kept")


@check()
async def a_session_reports_each_command(trial: Trial) -> None:
    async with await trial.shared.open_session() as session:
        result = await session.run("echo out; echo err >&2; false")
        equal((result.exit_code, result.stdout, result.stderr), (1, b"out\n", b"err\n"), "outcome")
        equal((await session.run("(exit 42)")).exit_code, 42, "exit code")
        equal((await session.run("echo still here")).stdout, b"still here\n", "the session goes on")


@check()
async def a_command_of_a_session_times_out(trial: Trial) -> None:
    async with await trial.shared.open_session() as session:
        result = await session.run(f"echo before; sleep {LONG}", timeout=0.5, kill_grace=0.5)
        holds(result.timed_out, "the result says timed_out")
        equal(result.stdout, b"before\n", "output so far")


@check()
async def the_end_of_a_session_ends_its_tree(trial: Trial) -> None:
    session = await trial.shared.open_session()
    await session.run(f"setsid sleep {LONG} >/dev/null 2>&1 &")
    await session.close()

    async def gone() -> bool:
        return not any(LONG in line for line in await processes(trial))

    await eventually("nothing of the session's tree is left", gone)
