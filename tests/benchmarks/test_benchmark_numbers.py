"""The arithmetic and the shape of the benchmarks' documents."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from benchmarks.budgets import at_least, at_most
from benchmarks.measure import Block, Series, percentile, run_block, run_rounds
from benchmarks.report import print_document, rows
from benchmarks.surroundings import Surroundings


def test_a_percentile_is_a_sample():
    samples = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert percentile(samples, 0.5) == 3.0
    assert percentile(samples, 0.99) == 5.0
    assert percentile(samples, 0.2) == 1.0
    assert math.isnan(percentile([], 0.5))


def test_budgets_say_by_how_much():
    assert at_most(4, 5, "ms")["met"] is True
    assert at_most(4, 5, "ms")["headroom_percent"] == 20.0
    assert at_most(6, 5, "ms") == {"budget": "<= 5 ms", "measured": 6, "met": False, "missed_by": "1 ms (20 %)"}
    assert at_least(200, 400, "MB/s")["missed_by"] == "200 MB/s (50 %)"
    assert at_most(0, 0)["met"] is True
    assert at_most(3, 0) == {"budget": "<= 0", "measured": 3, "met": False, "missed_by": "3"}
    assert at_most(None, 5, "ms")["missed_by"] == "not measured"
    assert at_least(None, 5)["missed_by"] == "not measured"


async def test_a_block_counts_failures_and_keeps_the_first():
    outcomes = iter([0.001, ValueError("broken"), 0.003, OSError("later")])

    async def operation() -> float:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    block = await run_block(4, 1, operation)
    assert block.samples_ms == [1.0, 3.0]
    assert block.failures == 2
    assert block.first_error == "ValueError: broken"


async def test_a_block_that_only_fails_ends_early():
    async def operation() -> float:
        raise OSError("down")

    block = await run_block(1000, 4, operation, give_up_after=5)
    assert 5 <= block.failures < 10


@pytest.mark.slow
async def test_rounds_take_turns(capsys):
    order: list[str] = []

    async def measured(name: str) -> Block:
        order.append(name)
        return Block([1.0, 2.0], wall_s=0.01)

    surroundings = Surroundings()
    series = await run_rounds(2, {"a": lambda: measured("a"), "b": lambda: measured("b")}, surroundings)
    assert len(surroundings.shares) == 2
    assert all(0 <= share <= 1 for share in surroundings.shares)
    assert order == ["a", "b", "a", "b"]
    assert series["a"].to_json()["n"] == 4
    assert series["a"].to_json()["per_s"] == 200.0
    assert capsys.readouterr().out == "", "stdout belongs to the result"


def test_the_report_shows_what_is_absent_and_what_was_missed():
    document = {
        "benchmark": "create",
        "command": "python -m benchmarks.create",
        "date": "today",
        "kernel": "6.1",
        "cpus": 2,
        "host": {"cpu": "some", "memory_mb": 1},
        "dsec": Series([Block([1.0], wall_s=1.0)]).to_json(),
        "peers": {"docker": {"absent": "dockerd is not installed"}},
        "budgets": {"create_p50_ms": at_most(6, 5, "ms")},
    }
    assert [name for name, _ in rows(document)] == ["dsec", "docker"]
    out = io.StringIO()
    print_document(document, Console(file=out, width=160))
    assert "dockerd is not installed" in out.getvalue()
    assert "missed by 1 ms (20 %)" in out.getvalue()


@pytest.mark.parametrize("name", ["create", "exec", "streams", "density", "cycles", "profile", "ondemand", "layers", "fork", "build"])
def test_every_benchmark_imports(name):
    __import__(f"benchmarks.{name}")
