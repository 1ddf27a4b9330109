"""The round trip of `true` in a living sandbox: `python -m benchmarks.exec -n 2000 --json`.

`dsec` is one sandbox and one command at a time; `dsec_many_live` the same with `--live` sandboxes, each command in another one of them;
`dsec_at_once` one sandbox with `-c` commands under way.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from benchmarks.budgets import at_most
from benchmarks.daemon import CpuMeter
from benchmarks.measure import Block, Series, percentile, run_block, run_rounds
from benchmarks.peers import Peer, PeerUnavailable
from benchmarks.stage import Stage, arguments, main, open_stage
from libdsec import Sandbox

__all__ = ["exec_true", "measure", "start_many", "stop_many"]


async def exec_true(sandbox: Sandbox, process_ms: list[float] | None = None) -> float:
    """Seconds until `true` has answered."""
    started = time.perf_counter()
    result = await sandbox.exec(["true"])
    took = time.perf_counter() - started
    if result.exit_code != 0:
        raise RuntimeError(f"true ended with exit code {result.exit_code}, signal {result.signal}")
    if process_ms is not None:
        process_ms.append(result.wall_ms)
    return took


async def start_many(
    stage: Stage, count: int, batch: int = 64, pace: list[tuple[int, float]] | None = None
) -> tuple[list[Sandbox], list[str]]:
    """`count` sandboxes by batches, one request each. What could not be made is in the second list, a message each.

    After each batch how many were made and the moment go to `pace`.
    """
    made: list[Sandbox] = []
    failures: list[str] = []
    while (left := count - len(made) - len(failures)) > 0:
        size = min(batch, left)
        try:
            got = await stage.client.run_many(stage.run_args(), count=size, timeout=120, allow_partial=True)
        except Exception as error:
            failures += [f"{type(error).__name__}: {error}"[:300]] * size
            continue
        made += got
        if pace is not None:
            pace.append((len(made), time.perf_counter()))
        failures += [f"only {len(got)} of a batch of {size} were made"] * (size - len(got))
    return made, failures


async def stop_many(sandboxes: list[Sandbox], at_once: int = 16) -> list[str]:
    """Stop all; the messages of those that would not."""
    waiting, failures = list(sandboxes), list[str]()

    async def work() -> None:
        while waiting:
            try:
                await waiting.pop().stop()
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}"[:300])

    await asyncio.gather(*(work() for _ in range(at_once)))
    return failures


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """First with one sandbox, in rounds with the peers; then with many."""
    async with open_stage(options.peers) as stage:
        process_ms: list[float] = []
        sandbox = await stage.client.run_container(stage.run_args())
        await run_block(options.warm_up, 1, lambda: exec_true(sandbox))
        share = max(1, options.n // options.rounds)
        meter = CpuMeter(stage.daemon)
        things: dict[str, Callable[[], Awaitable[Block]]] = {
            "dsec": meter.around(lambda: run_block(share, 1, lambda: exec_true(sandbox, process_ms))),
            "dsec_at_once": lambda: run_block(share, options.concurrency, lambda: exec_true(sandbox)),
        }
        if (floor := stage.floor) is not None:
            things["floor"] = lambda: floor.exec(share)
        living: dict[str, tuple[Peer, str]] = {}
        for name, peer in stage.peers.items():
            try:
                living[name] = (peer, await peer.start())
            except PeerUnavailable as error:
                stage.absent[name] = str(error)
                continue
            things[name] = partial(run_block, max(1, options.peer_n // options.rounds), 1, partial(peer.exec_true, living[name][1]))
        series = await run_rounds(options.rounds, things, options.surroundings)
        for peer, identifier in living.values():
            await peer.remove(identifier)
        many, start_failures = await _many_live(stage, options)
        stage.daemon.sample_peaks()
        await sandbox.stop()
        return _document(options, stage, series, many, start_failures, process_ms, [*living], meter)


async def _many_live(stage: Stage, options: argparse.Namespace) -> tuple[Series, list[str]]:
    print(f"starting {options.live} sandboxes", file=sys.stderr, flush=True)
    sandboxes, failures = await start_many(stage, options.live)
    chosen = random.Random(1)
    try:
        await run_block(options.warm_up, 1, lambda: exec_true(chosen.choice(sandboxes)))
        share = max(1, options.n // options.rounds)
        many = {"dsec_many_live": lambda: run_block(share, 1, lambda: exec_true(chosen.choice(sandboxes)))}
        series = await run_rounds(options.rounds, many, options.surroundings)
    finally:
        failures += await stop_many(sandboxes)
    return series["dsec_many_live"], failures


def _document(
    options: argparse.Namespace,
    stage: Stage,
    series: dict[str, Series],
    many: Series,
    start_failures: list[str],
    process_ms: list[float],
    living: list[str],
    meter: CpuMeter,
) -> dict[str, Any]:
    done = {name: one.to_json() for name, one in series.items()}
    dsec, many_live = done["dsec"], many.to_json()
    peers = {name: done[name] | {"how": stage.peers[name].how.get("exec", "")} for name in living}
    alone = dsec.get("p50_ms")
    return {
        "n": options.n,
        "rounds": options.rounds,
        "warm_up": f"{options.warm_up} commands before the first round, not counted",
        "root": stage.root.to_json(),
        "dsec": dsec
        | {
            "how": "libdsec exec(['true']), one at a time, with a record of each",
            "phases": {"process": {"p50_ms": round(percentile(process_ms, 0.5), 3), "p99_ms": round(percentile(process_ms, 0.99), 3)}},
            "cpu_ms_each": meter.to_json(),
            "peak_rss_mb": stage.daemon.peak_rss_mb(),
        },
        "dsec_at_once": done["dsec_at_once"] | {"concurrency": options.concurrency},
        "dsec_many_live": many_live
        | {"live": options.live, "start_or_stop_failures": len(start_failures), "first_failure": (start_failures or [""])[0]},
        "peers": stage.peer_documents(peers),
        "floor": done["floor"] | {"how": "floor.c: fork, setns by pidfd, vfork, exec true; no record"}
        if "floor" in done
        else {"absent": stage.absent.get("floor", "")},
        "budgets": {
            "exec_p50_ms": at_most(alone, 1.5, "ms"),
            "exec_p99_ms": at_most(dsec.get("p99_ms"), 4, "ms"),
            "many_live_p50_ratio": at_most(round(many_live["p50_ms"] / alone, 3) if alone and "p50_ms" in many_live else None, 2, "x"),
            "failures": at_most(dsec["failures"] + many_live["failures"] + len(start_failures), 0),
        },
    }


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("-n", type=int, default=2000, help="commands of ours and of the floor, in each setting")
    parser.add_argument("-c", "--concurrency", type=int, default=16, help="commands under way at once in `dsec_at_once`")
    parser.add_argument("--live", type=int, default=500, help="sandboxes alive in `dsec_many_live` (benchmarks.density goes to thousands)")
    parser.add_argument("--peer-n", type=int, default=100, help="commands of each peer")
    parser.add_argument("--warm-up", type=int, default=100, help="commands before the first round")
    main("exec", measure, parser.parse_args())
