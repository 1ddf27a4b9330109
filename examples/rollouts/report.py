"""The table at the end, and the same as one JSON object."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .rollout import Outcome

__all__ = ["objections_to", "print_table", "summary"]


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Numbers by policy. `reward` is the mean over all rollouts of the policy, a failed trajectory counting as nothing earned."""
    return {
        policy: _of_policy([each for each in outcomes if each.policy == policy]) for policy in dict.fromkeys(o.policy for o in outcomes)
    }


def objections_to(outcomes: Sequence[Outcome]) -> list[str]:
    """Why the job did not show what it must: the oracle earns all, those that do not do the work earn nothing, nothing fails."""
    found = [f"{o.policy} #{o.index}: failed trajectory: {o.reason}" for o in outcomes if o.reward is None]
    for outcome in outcomes:
        if outcome.policy == "oracle" and outcome.reward == 0.0:
            found.append(f"oracle #{outcome.index} earned nothing: {outcome.reason}")
        if outcome.policy in ("idle", "wrong", "tamperer") and outcome.reward:
            found.append(f"{outcome.policy} #{outcome.index} ({outcome.variant}) earned {outcome.reward}")
    return found


def print_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    """One row a policy, then why nothing was earned, counted."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", collapse_padding=True, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in ("rollouts", "failed", "reward", "steps", "create ms\np50 / p99", "exec ms\np50 / p99", "peak MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, row in summary(outcomes).items():
        table.add_row(
            *[policy, str(row["rollouts"]), str(row["failed"]), f"{row['reward']:.2f}", f"{row['steps']:.1f}"],
            *[_pair(row["create_p50_ms"], row["create_p99_ms"]), _pair(row["exec_p50_ms"], row["exec_p99_ms"])],
            f"{row['peak_memory_mb']:.0f}",
        )
    console.print(table)
    reasons: dict[tuple[str, str, str], int] = {}
    for outcome in outcomes:
        if outcome.reason:
            key = (outcome.policy, outcome.variant, outcome.reason)
            reasons[key] = reasons.get(key, 0) + 1
    for (policy, variant, reason), count in sorted(reasons.items()):
        console.print(f"  {count:3} x {policy}{f' ({variant})' if variant else ''}: {reason}", highlight=False, markup=False)


def _of_policy(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    create = [value for outcome in outcomes for value in outcome.samples.create_ms]
    execs = [value for outcome in outcomes for value in outcome.samples.exec_ms]
    return {
        "rollouts": len(outcomes),
        "failed": sum(outcome.reward is None for outcome in outcomes),
        "reward": statistics.fmean(outcome.reward or 0.0 for outcome in outcomes),
        "steps": statistics.fmean(len(outcome.steps) for outcome in outcomes),
        "create_p50_ms": _percentile(create, 50),
        "create_p99_ms": _percentile(create, 99),
        "exec_p50_ms": _percentile(execs, 50),
        "exec_p99_ms": _percentile(execs, 99),
        "peak_memory_mb": max(outcome.samples.peak_memory_bytes for outcome in outcomes) / (1 << 20),
    }


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def _pair(p50: float | None, p99: float | None) -> str:
    if p50 is None or p99 is None:
        return "-"
    return f"{p50:.{p50 < 100:d}f} / {p99:.{p99 < 100:d}f}"
