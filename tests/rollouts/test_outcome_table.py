"""The end of the job: what counts as not as it must be, the numbers, and the view on the way there."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from examples.rollouts.agent import Step
from examples.rollouts.progress import Progress
from examples.rollouts.report import objections_to, print_table, summary
from examples.rollouts.rollout import Outcome
from examples.rollouts.verify import Samples


def _outcome(policy: str, reward: float | None, reason: str = "", index: int = 0) -> Outcome:
    return Outcome(index, policy, "", reward=reward, reason=reason)


def test_the_expected_outcome_has_no_objection() -> None:
    assert objections_to([_outcome("oracle", 1.0), _outcome("idle", 0.0), _outcome("wrong", 0.0), _outcome("tamperer", 0.0)]) == []


@pytest.mark.parametrize("policy", ["idle", "wrong", "tamperer"])
def test_a_reward_for_no_work_is_objected_to(policy: str) -> None:
    assert objections_to([_outcome(policy, 1.0)]) == [f"{policy} #0 () earned 1.0"]


def test_an_oracle_that_earns_nothing_is_objected_to() -> None:
    assert objections_to([_outcome("oracle", 0.0, "why")]) == ["oracle #0 earned nothing: why"]


def test_a_failed_trajectory_is_objected_to_with_its_cause() -> None:
    assert objections_to([_outcome("idle", None, "sandbox: oom")]) == ["idle #0: failed trajectory: sandbox: oom"]


def test_a_model_may_earn_or_not() -> None:
    assert objections_to([_outcome("openai", 1.0), _outcome("openai", 0.0)]) == []


def test_numbers_are_by_policy_and_a_failed_trajectory_is_counted_as_such() -> None:
    first = _outcome("oracle", 1.0)
    first.samples = Samples([1.0, 2.0, 3.0, 4.0], [float(number) for number in range(1, 101)], 5 << 20)
    first.steps = [Step("run", {}, True, "", 0.1)] * 3
    failed = _outcome("oracle", None, "sandbox: oom")
    assert summary([first, failed, _outcome("idle", 0.0)])["oracle"] == {
        "rollouts": 2,
        "failed": 1,
        "reward": 0.5,
        "steps": 1.5,
        "create_p50_ms": 2.0,
        "create_p99_ms": 4.0,
        "exec_p50_ms": 50.0,
        "exec_p99_ms": 99.0,
        "peak_memory_mb": 5.0,
    }


def test_the_table_fits_eighty_columns_and_says_why_nothing_was_earned() -> None:
    output = io.StringIO()
    slow = _outcome("tamperer", 0.0, "not carried: keys.py is a fifo")
    slow.samples = Samples([12.34, 99.9], [1234.4, 9999.4], 512 << 20)
    print_table(Console(file=output, width=80), [slow, slow, _outcome("oracle", 1.0)])
    text = output.getvalue()
    assert "1234 / 9999" in text
    assert "2 x tamperer: not carried: keys.py is a fifo" in text
    assert "12.3 / 99.9" in text
    assert "…" not in text


def test_without_a_terminal_progress_is_lines() -> None:
    output = io.StringIO()
    with Progress(Console(file=output, force_terminal=False, width=120)) as progress:
        progress.phase("prepare")
        progress.expect([_outcome("idle", None, index=index) for index in range(8)])
        for index in range(8):
            progress.tell(index, "acting")
            progress.tell(index, "failed" if index else "done")
    lines = [line.partition("] ")[2] for line in output.getvalue().splitlines()]
    assert lines == ["prepare", "2 of 8 rollouts ended", "4 of 8 rollouts ended", "6 of 8 rollouts ended", "8 of 8 rollouts ended"]


def test_on_a_terminal_progress_counts_stages_by_policy() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with Progress(console) as progress:
        progress.phase("working")
        progress.expect([_outcome("idle", None, index=0), _outcome("idle", None, index=1), _outcome("oracle", None, index=2)])
        progress.tell(0, "verifying")
        progress.tell(1, "failed")
        with console.capture() as shown:
            console.print(progress._render())
    rows = {line.split()[0]: line.split()[1:] for line in _plain(shown.get()).splitlines() if line.strip()}
    assert rows["policy"] == ["waiting", "acting", "verifying", "done", "failed"]
    assert rows["idle"] == ["·", "·", "1", "·", "1"]
    assert rows["oracle"] == ["1", "·", "·", "·", "·"]


def _plain(text: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    from rich.text import Text

    console.print(Text.from_ansi(text))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
