"""`python -m examples.rollouts`: run the job, print the table, say whether it showed what it must and whether anything is left."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from libdsec import DSecError

from .daemon import DaemonError
from .job import AlreadyRunning, Job, JobResult, trajectory
from .leftovers import KINDS
from .policies import available
from .prepare import PrepareError
from .progress import Progress
from .releases import ReleaseError
from .report import objections_to, print_table, summary
from .task import CACHETOOLS

_EXPECTED = (DSecError, DaemonError, PrepareError, ReleaseError, AlreadyRunning, ValueError)
_DEFAULT_STATE = Path(__file__).parents[2] / "build" / "run-state"


def main() -> int:
    """0 if the oracle earned all, nobody else who must not earned anything, and nothing is left; 1 if not; 130 after a Ctrl-C."""
    options = _options()
    console = Console(stderr=options.json)
    if os.geteuid() != 0:
        console.print("This needs root: it starts container sandboxes.", style="red")
        return 1
    started = time.monotonic()
    with Progress(console) as progress:
        job = Job(options.state.resolve(), options.rollouts, options.policies, progress)
        problem, code = "", 1
        try:
            asyncio.run(_until_signalled(job))
        except asyncio.CancelledError:
            problem, code = "interrupted", 130
        except BaseException as error:
            problem = _in_words(error)
    if options.json:
        print(_as_json(job.result, problem, time.monotonic() - started))
        return _verdict(job.result, problem, code)
    _print(console, job.result, problem, time.monotonic() - started)
    return _verdict(job.result, problem, code)


async def _until_signalled(job: Job) -> None:
    """Run the job; the first signal cancels it. Later ones do nothing, since what they could cut short is the cleaning up."""
    work = asyncio.ensure_future(job.run())
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not work.cancelling():
            job.progress.phase("interrupted: ending the sandboxes and the server")
            work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    await work


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.rollouts",
        description="Run the job, print the table, say whether it showed what it must and whether anything is left.",
        epilog="Where OPENAI_BASE_URL and OPENAI_MODEL are set (OPENAI_API_KEY too if the endpoint wants one) there is a policy openai.",
    )
    parser.add_argument("--rollouts", type=int, default=64, metavar="N", help="how many at once (default 64)")
    parser.add_argument("--policy", action="append", dest="policies", choices=available(), help="repeat for a mix; default: all available")
    parser.add_argument(
        "--state", type=Path, default=_DEFAULT_STATE, metavar="DIR", help="where layers and records are kept (default build/run-state)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    if options.rollouts < 1:
        parser.error("--rollouts is at least 1")
    options.policies = options.policies or available()
    return options


def _in_words(error: BaseException) -> str:
    """An expected failure in its own words; anything else is a fault of ours and is raised."""
    found = list(_leaves(error))
    if not all(isinstance(each, _EXPECTED) for each in found):
        raise error
    return "; ".join(dict.fromkeys(f"{type(each).__name__}: {each}" for each in found))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _verdict(result: JobResult, problem: str, code: int) -> int:
    if problem:
        return code
    return int(bool(objections_to(result.outcomes) or result.leftovers.left))


def _print(console: Console, result: JobResult, problem: str, seconds: float) -> None:
    if problem:
        console.print(problem, style="red", markup=False)
    else:
        if result.expectation is not None:
            turned, kept = len(result.expectation.fail_to_pass), len(result.expectation.pass_to_pass)
            console.print(
                f"{CACHETOOLS.old.folder} -> {CACHETOOLS.new.version}: {turned} tests fail to pass, {kept} pass to pass", highlight=False
            )
        print_table(console, result.outcomes)
        for objection in objections_to(result.outcomes):
            console.print(f"NOT AS IT MUST BE: {objection}", style="bold red", markup=False)
    if result.run:
        for item in result.leftovers.held:
            console.print(f"Ended, but still held: {item}", style="yellow", markup=False)
        for item in result.leftovers.left:
            console.print(f"LEFT BEHIND: {item}", style="bold red", markup=False)
        if not result.leftovers.left:
            console.print(f"Nothing is left: no {', no '.join(KINDS)} outside the state folder.", style="green")
    times = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
    console.print(f"{seconds:.1f} s in all ({times})", highlight=False)


def _as_json(result: JobResult, problem: str, seconds: float) -> str:
    expectation = result.expectation
    document = {
        "task": CACHETOOLS.name,
        "problem": problem or None,
        "fail_to_pass": len(expectation.fail_to_pass) if expectation else None,
        "pass_to_pass": len(expectation.pass_to_pass) if expectation else None,
        "policies": summary(result.outcomes) if not problem else {},
        "objections": objections_to(result.outcomes) if not problem else [],
        "left": result.leftovers.left,
        "held": result.leftovers.held,
        "seconds": {**result.seconds, "all": round(seconds, 3)},
        "rollouts": [
            {key: value for key, value in trajectory(each).items() if key not in ("steps", "samples")} for each in result.outcomes
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode()


if __name__ == "__main__":
    sys.exit(main())
