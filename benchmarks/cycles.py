"""Lives of sandboxes, and what they leave: `python -m benchmarks.cycles -n 1000 --json`.

Each cycle creates a sandbox, runs a command and stops it. What the daemon holds is counted before and after. With `--kill-edge` the daemon
gets kill -9 at random moments and is started again; calls that were under way fail with a typed error, and still nothing may stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.budgets import at_most
from benchmarks.exec import exec_true
from benchmarks.measure import Block, Series, run_block
from benchmarks.stage import Stage, arguments, main, open_stage
from libdsec import DSecError, NotFound

__all__ = ["measure"]


async def _cycle(stage: Stage, errors: Counter[str], *, tolerant: bool) -> float:
    """One life. `tolerant`: a typed error is all that a killed daemon owes its clients; it is counted by kind, and is no failure."""
    started = time.perf_counter()
    try:
        async with await stage.client.run_container(stage.run_args(), timeout=60) as sandbox:
            await exec_true(sandbox)
    except DSecError as error:
        errors[type(error).__name__] += 1
        if not tolerant:
            raise
    return time.perf_counter() - started


async def _kill_at_random(stage: Stage, every_s: float, seed: int, down_s: list[float]) -> None:
    """kill -9 and start again, for ever; the times from kill to answering again go to `down_s`."""
    moments = random.Random(seed)
    while True:
        await asyncio.sleep(moments.uniform(0.2, 2 * every_s))
        killed = time.perf_counter()
        stage.daemon.kill()
        await stage.daemon.start()
        down_s.append(time.perf_counter() - killed)
        print(f"killed, answering again after {down_s[-1]:.2f} s", file=sys.stderr, flush=True)


async def _settle(stage: Stage, expected: dict[str, int], deadline_s: float) -> dict[str, int]:
    """Stop what lives, then wait until nothing more is held than before, at most until the deadline; what is held then."""
    deadline = time.monotonic() + deadline_s
    while True:
        for info in await stage.client.list():
            if info.state not in ("stopped", "failed"):
                with contextlib.suppress(NotFound):
                    await (await stage.client.get(info.sandbox_id)).stop()
        held = stage.daemon.holdings()
        if all(held[name] <= expected[name] for name in held) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.2)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Warm up, count, cycle, count."""
    async with open_stage() as stage:
        errors: Counter[str] = Counter()
        await run_block(options.warm_up, options.concurrency, lambda: _cycle(stage, Counter(), tolerant=False))
        before = await _settle(stage, dict.fromkeys(stage.daemon.holdings(), 0), 2)
        await options.surroundings.look()
        down_s: list[float] = []
        killer = asyncio.create_task(_kill_at_random(stage, options.kill_every, options.seed, down_s)) if options.kill_edge else None
        try:
            block = await run_block(options.n, options.concurrency, lambda: _cycle(stage, errors, tolerant=options.kill_edge))
        finally:
            if killer is not None:
                killer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await killer
                if not stage.daemon.pid:
                    await stage.daemon.start()
        stage.daemon.sample_peaks()
        after = await _settle(stage, before, options.settle)
        return _document(options, stage, block, errors, down_s, before, after)


def _document(
    options: argparse.Namespace,
    stage: Stage,
    block: Block,
    errors: Counter[str],
    down_s: list[float],
    before: dict[str, int],
    after: dict[str, int],
) -> dict[str, Any]:
    leaked = {name: after[name] - before[name] for name in after}
    return {
        "n": options.n,
        "concurrency": options.concurrency,
        "warm_up": f"{options.warm_up} cycles before the first count",
        "root": stage.root.to_json(),
        "dsec": Series([block]).to_json()
        | {
            "how": "libdsec run_container, exec true, stop",
            "held_before": before,
            "held_after": after,
            "leaked": leaked,
            "errors_by_kind": dict(errors),
            "kills": len(down_s),
            "down_s": [round(one, 3) for one in down_s],
            "peak_rss_mb": stage.daemon.peak_rss_mb(),
        },
        "budgets": {
            "leaked": at_most(sum(count for count in leaked.values() if count > 0), 0),
            "failures": at_most(block.failures, 0),
        },
    }


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("-n", type=int, default=1000, help="cycles")
    parser.add_argument("-c", "--concurrency", type=int, default=16, help="cycles under way at once")
    parser.add_argument("--warm-up", type=int, default=50, help="cycles before the first count")
    parser.add_argument("--kill-edge", action="store_true", help="kill -9 the daemon at random moments and start it again")
    parser.add_argument("--kill-every", type=float, default=1.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds that the sweep has to bring all back after the last cycle")
    main("cycles", measure, parser.parse_args())
