"""Samples to percentiles, and the shape that every measured thing has in a benchmark's JSON."""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.surroundings import Surroundings

__all__ = ["Block", "Series", "percentile", "run_block", "run_rounds"]


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed: a value that was measured, never an interpolated one."""
    if not samples:
        return math.nan
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(slots=True)
class Block:
    """What one round measured of one thing: a latency in ms for each success, and the wall time of the whole round."""

    samples_ms: list[float] = field(default_factory=list)
    failures: int = 0
    wall_s: float = 0.0
    first_error: str = ""


@dataclass(slots=True)
class Series:
    """All rounds of one thing. Percentiles are over all samples; rates are the median of the rounds, which shrugs off a noisy one."""

    blocks: list[Block] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        samples = [sample for block in self.blocks for sample in block.samples_ms]
        document: dict[str, Any] = {"n": len(samples), "failures": sum(block.failures for block in self.blocks)}
        if samples:
            by_round = [round(percentile(block.samples_ms, 0.50), 3) for block in self.blocks if block.samples_ms]
            document |= {
                "p50_ms": round(percentile(samples, 0.50), 3),
                "p90_ms": round(percentile(samples, 0.90), 3),
                "p99_ms": round(percentile(samples, 0.99), 3),
                "max_ms": round(max(samples), 3),
                "per_s": round(statistics.median(len(b.samples_ms) / b.wall_s for b in self.blocks if b.wall_s > 0), 1),
                "p50_ms_by_round": by_round,
                "p50_ms_best_round": min(by_round),
            }
        errors = [block.first_error for block in self.blocks if block.first_error]
        if errors:
            document["first_error"] = errors[0]
        return document | self.extra


async def run_block(count: int, concurrency: int, operation: Callable[[], Awaitable[float]], *, give_up_after: int = 20) -> Block:
    """Run `operation` `count` times with `concurrency` workers. It returns its own latency in seconds, so that clean-up need not count.

    Failures are counted, the first is kept; after `give_up_after` of them without one success the block ends early.
    """
    block = Block()
    left = count

    async def work() -> None:
        nonlocal left
        while left > 0 and not (block.failures >= give_up_after and not block.samples_ms):
            left -= 1
            try:
                block.samples_ms.append(await operation() * 1e3)
            except Exception as error:
                block.failures += 1
                block.first_error = block.first_error or f"{type(error).__name__}: {error}"[:500]

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(concurrency, count))))
    block.wall_s = time.perf_counter() - started
    return block


async def run_rounds(rounds: int, things: Mapping[str, Callable[[], Awaitable[Block]]], surroundings: Surroundings) -> dict[str, Series]:
    """Every thing once a round, in turn: what disturbs the machine for a while then disturbs all of them."""
    series = {name: Series() for name in things}
    for number in range(rounds):
        await surroundings.look()
        for name, measure in things.items():
            block = await measure()
            series[name].blocks.append(block)
            note = f", {block.failures} failed: {block.first_error}" if block.failures else ""
            print(
                f"round {number + 1}/{rounds} {name}: {len(block.samples_ms)} in {block.wall_s:.2f} s, "
                f"p50 {percentile(block.samples_ms, 0.5):.2f} ms{note}",
                file=sys.stderr,
                flush=True,
            )
    return series
