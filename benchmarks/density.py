"""Many sandboxes at once: `python -m benchmarks.density -n 3200 --json`.

Creations until `-n` are live, all of them asked once, commands with all of them live, what one idle sandbox costs the host, and how fast
they go. Memory is read in two ways, as neither is beyond doubt: what MemAvailable lost, and the proportional sizes of all our processes
plus what the kernel's own memory grew by. The larger counts against the budget.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

from benchmarks.budgets import at_least, at_most
from benchmarks.exec import exec_true, start_many, stop_many
from benchmarks.host import kernel_memory_bytes, meminfo, process_name, pss_bytes
from benchmarks.measure import Block, Series, run_block
from benchmarks.stage import Stage, arguments, main, open_stage
from libdsec import Sandbox

__all__ = ["measure"]

MIB = 1 << 20


def _memory(stage: Stage) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for pid in stage.daemon.pids():
        name = "edge" if pid == stage.daemon.pid else process_name(pid)
        sizes[name] = sizes.get(name, 0) + pss_bytes(pid)
    kernel = kernel_memory_bytes()
    totals = {"available": meminfo()["MemAvailable"], "pss": sum(sizes.values()), "kernel": sum(kernel.values())}
    return totals | {f"pss of {name}": size for name, size in sizes.items()} | {f"kernel {name}": size for name, size in kernel.items()}


async def _settled_memory(stage: Stage) -> dict[str, int]:
    """The reading of least available memory of three, a moment apart: pages on their way to the free list are not ours."""
    readings = []
    for _ in range(3):
        await asyncio.sleep(0.5)
        readings.append(_memory(stage))
    return max(readings, key=lambda reading: reading["available"])


async def _warm(stage: Stage, count: int) -> None:
    made, _ = await start_many(stage, count)
    for sandbox in made:
        await exec_true(sandbox)
    await stop_many(made)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Fill, ask, measure, empty."""
    async with open_stage() as stage:
        await _warm(stage, options.warm_up)
        await options.surroundings.look()
        before, holdings = await _settled_memory(stage), stage.daemon.holdings()
        alone = await _alone(stage, options)
        started = time.perf_counter()
        pace: list[tuple[int, float]] = []
        sandboxes, failures = await start_many(stage, options.n, options.batch, pace)
        filled = time.perf_counter() - started
        print(f"{len(sandboxes)} live after {filled:.2f} s, {len(failures)} failures {failures[:1]}", file=sys.stderr, flush=True)
        try:
            full = await _settled_memory(stage)
            asked = await _ask_all(sandboxes, options.concurrency)
            chosen = random.Random(1)
            many = Series([await run_block(options.exec_n, 1, lambda: exec_true(chosen.choice(sandboxes)))])
            stage.daemon.sample_peaks()
        finally:
            started = time.perf_counter()
            stop_failures = await stop_many(sandboxes)
            emptied = time.perf_counter() - started
        after = await _settled_memory(stage)
        left = {name: count - holdings[name] for name, count in stage.daemon.holdings().items()}
        memory = _per_sandbox(before, full, len(sandboxes))
        create = {
            "n": len(sandboxes),
            "failures": len(failures),
            "first_error": (failures or [""])[0],
            "wall_s": round(filled, 3),
            "per_s": round(len(sandboxes) / filled, 1),
            "per_s_by_live": _pace_by_live(pace),
            "batch": options.batch,
        }
        stop = {"failures": len(stop_failures), "first_error": (stop_failures or [""])[0], "per_s": round(len(sandboxes) / emptied, 1)}
        return _document(options, stage, create, asked, alone, many, stop, memory, _bytes_kept(before, after), left)


async def _alone(stage: Stage, options: argparse.Namespace) -> Series:
    """The same commands with one sandbox live, to compare with."""
    async with await stage.client.run_container(stage.run_args()) as sandbox:
        return Series([await run_block(options.exec_n, 1, lambda: exec_true(sandbox))])


async def _ask_all(sandboxes: list[Sandbox], at_once: int) -> Block:
    """Each sandbox runs one command: those that do not answer are failures."""
    waiting = list(sandboxes)
    return await run_block(len(sandboxes), at_once, lambda: exec_true(waiting.pop()))


def _pace_by_live(pace: list[tuple[int, float]], parts: int = 8) -> dict[str, float]:
    """Creations a second while the number of those live grew up to each of the numbers: does it slow down?"""
    found: dict[str, float] = {}
    live, moment = pace[0] if pace else (0, 0.0)
    for count, at in pace[max(1, len(pace) // parts) :: max(1, len(pace) // parts)]:
        found[str(count)] = round((count - live) / (at - moment), 1)
        live, moment = count, at
    return found


def _per_sandbox(before: dict[str, int], full: dict[str, int], count: int) -> dict[str, float]:
    count = max(1, count)
    each = {name: (full[name] - before.get(name, 0)) / count / MIB for name in full}
    available = -each.pop("available")
    return {
        "mem_available_delta_mb": round(available, 4),
        "pss_plus_kernel_mb": round(each["pss"] + each["kernel"], 4),
        **{f"{name.replace(' ', '_')}_mb": round(value, 4) for name, value in each.items()},
    }


def _bytes_kept(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    return {
        "mem_available_mb": round((before["available"] - after["available"]) / MIB, 1),
        "kernel_mb": round((after["kernel"] - before["kernel"]) / MIB, 1),
        "pss_mb": round((after["pss"] - before["pss"]) / MIB, 1),
    }


def _document(
    options: argparse.Namespace,
    stage: Stage,
    create: dict[str, Any],
    asked: Block,
    alone: Series,
    many: Series,
    stop: dict[str, Any],
    memory: dict[str, float],
    kept: dict[str, float],
    left: dict[str, int],
) -> dict[str, Any]:
    one, all_live, first = alone.to_json(), many.to_json(), Series([asked]).to_json()
    for document in (one, all_live, first):
        document.pop("p50_ms_by_round", None)
        document.pop("p50_ms_best_round", None)
    ratio = round(all_live["p50_ms"] / one["p50_ms"], 3) if "p50_ms" in all_live and "p50_ms" in one else None
    return {
        "n": options.n,
        "warm_up": f"{options.warm_up} sandboxes made, asked and stopped before, not counted",
        "root": stage.root.to_json(),
        "dsec": {
            "how": "libdsec run_many in batches, one request after another; then `true` once in each; then in one at random, one at a time",
            "create": create,
            "first_command": first | {"concurrency": options.concurrency},
            "exec_one_live": one,
            "exec_all_live": all_live,
            "stop": stop,
            "memory_per_idle_sandbox": memory,
            "memory_kept_after_stop": kept,
            "left_after_stop": left,
            "peak_rss_mb": stage.daemon.peak_rss_mb(),
        },
        "budgets": {
            "create_per_s": at_least(create["per_s"], 400, "/s"),
            "create_failures": at_most(create["failures"] + options.n - create["n"], 0),
            "first_command_failures": at_most(first["failures"], 0),
            "memory_mb_per_sandbox": at_most(max(memory["mem_available_delta_mb"], memory["pss_plus_kernel_mb"]), 1, "MB"),
            "exec_all_live_p50_ratio": at_most(ratio, 2, "x"),
            "exec_all_live_p50_ms": at_most(all_live.get("p50_ms"), 3, "ms"),
            "left_after_stop": at_most(sum(count for count in left.values() if count > 0), 0),
        },
    }


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("-n", type=int, default=3200, help="sandboxes to be live at once")
    parser.add_argument("-c", "--concurrency", type=int, default=16, help="commands under way while each sandbox is asked once")
    parser.add_argument("--batch", type=int, default=64, help="sandboxes a request")
    parser.add_argument("--exec-n", type=int, default=1000, help="commands with all of them live")
    parser.add_argument("--warm-up", type=int, default=64, help="sandboxes made and stopped before")
    main("density", measure, parser.parse_args())
