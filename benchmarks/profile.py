"""Where the time goes: `python -m benchmarks.profile create -n 300 --json`.

CPU time an operation takes, by the name of the process, with the functions that it went to (each with what it called), from perf's samples
of the whole machine; and the daemon's Python functions from cProfile, which slows Python down and so gives shares, not times. What else
runs on the machine is in the list too. Use it where a budget is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import pstats
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.create import Creator
from benchmarks.exec import exec_true
from benchmarks.measure import Block, Series, run_block
from benchmarks.stage import Stage, arguments, main, open_stage

__all__ = ["measure"]

FREQUENCY = 4000
OURS = ("python", "dsec-launcher", "aether", "init", "chronus", "true")
FUNCTIONS = 25
_WAITS = ("run", "<method 'disable' of '_lsprof.Profiler' objects>")
"""Frames in which the daemon waits for events."""
_LINE = re.compile(r"^\s*([\d.]+)%\s+(?:([\d.]+)%\s+)?(\d+)\s+(.*)$")


async def _sampled(data: Path, work: Awaitable[Block]) -> Block:
    argv = ["perf", "record", "-q", "-F", str(FREQUENCY), "-e", "cpu-clock", "-a", "-g", "-o", str(data)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as perf:
        await asyncio.sleep(1)  # perf says nothing when it begins to record
        block = await work
        perf.terminate()
        await asyncio.to_thread(perf.wait)
    return block


def _report(data: Path, *options: str) -> list[tuple[float, int, str]]:
    """Lines of `perf report`: percent (with callees where asked), own samples, name."""
    argv = ["perf", "report", "--stdio", "-i", str(data), "-n", "-g", "none", *options]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = [match for match in map(_LINE.match, done.stdout.splitlines()) if match]
    return [(float(match[1]), int(match[3]), re.sub(r"\s+-\s+-\s*$", "", match[4]).strip()) for match in lines]


def _cpu_by_process(data: Path, count: int) -> dict[str, Any]:
    processes = _report(data, "--no-children", "-s", "comm")
    total = sum(samples for _, samples, _ in processes)
    each = total / FREQUENCY * 1e3 / max(1, count)
    document: dict[str, Any] = {name: {"cpu_ms_each": round(samples / total * each, 3)} for _, samples, name in processes[:20]}
    for name in OURS:
        if name in document and name != "python":
            functions = _report(data, "--children", "--comms", name, "-s", "symbol")[:FUNCTIONS]
            document[name]["functions_ms_each"] = {symbol: round(share / 100 * each, 3) for share, _, symbol in functions}
    return document


def _python_functions(profile: Path) -> dict[str, float]:
    """Share of the daemon's Python time that each function took by itself, the largest first."""
    statistics: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    busy = {place: values[2] for place, values in statistics.items() if place[2] not in _WAITS}
    total = sum(busy.values())
    largest = sorted(busy.items(), key=lambda item: -item[1])[:FUNCTIONS]
    return {f"{'/'.join(Path(file).parts[-2:])}:{line} {name}": round(own / total, 4) for (file, line, name), own in largest}


async def _run(stage: Stage, options: argparse.Namespace, observed: Callable[[Awaitable[Block]], Awaitable[Block]]) -> dict[str, Any]:
    creator = Creator(stage, stage.run_args())
    async with await stage.client.run_container(stage.run_args()) as sandbox:
        operation: Callable[[], Awaitable[float]] = creator if options.what == "create" else lambda: exec_true(sandbox)
        await run_block(20, options.concurrency, operation)
        creator.phases.clear()
        series = Series([await observed(run_block(options.n, options.concurrency, operation))])
    return series.to_json() | {"phases": creator.phases_json()}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Once under perf, once with the daemon under cProfile."""
    document: dict[str, Any] = {"n": options.n, "concurrency": options.concurrency}
    if shutil.which("perf") is None:
        print("perf is not installed: only the daemon's Python is looked at", file=sys.stderr)
    else:
        async with open_stage() as stage:
            data = stage.folder / "perf.data"
            document["dsec"] = await _run(stage, options, partial(_sampled, data))
            document["cpu"] = _cpu_by_process(data, options.n)
    await options.surroundings.look()
    async with open_stage(profiled=True) as stage:
        await _run(stage, options, stage.daemon.profiled)
        document["edge_python_share"] = _python_functions(stage.daemon.profile)
    return document


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["create", "exec"])
    parser.add_argument("-n", type=int, default=300, help="operations")
    parser.add_argument("-c", "--concurrency", type=int, default=1, help="operations under way at once")
    main("profile", measure, parser.parse_args())
