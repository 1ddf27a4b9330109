"""From what the verifier's sandbox printed to a reward. Pure: no sandbox, no clock.

Every line of the report is a claim. A reward needs all of: the supervisor's own line with the nonce, a clean exit of the tests' process,
an end mark that counts the lines, each expected test reported passed exactly once, each canary reported as it must be, and no test that
nobody asked for.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Expectation", "Report", "Verdict", "judge", "parse"]

_OUTCOMES = frozenset({"passed", "failed", "error", "skipped", "xfailed", "xpassed", "none"})


@dataclass(frozen=True, slots=True)
class Expectation:
    """The test ids that a right fix turns from failing to passing, and those that it must keep passing."""

    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    others: frozenset[str] = frozenset()
    """Tests that count for nothing: skipped or failing with the right fix too."""


@dataclass(frozen=True, slots=True)
class Report:
    """Real tests' outcomes by id. `faults` says why the report does not hold together; then nothing in it counts."""

    outcomes: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    other_user: bool = False
    seconds: float = 0.0
    log: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` is 1.0 or 0.0; `reason` is empty for 1.0."""

    reward: float
    reason: str = ""
    fail_to_pass: tuple[int, int] = (0, 0)
    """Passed, of how many."""
    pass_to_pass: tuple[int, int] = (0, 0)


def parse(printed: bytes, exit_code: int | None, *, nonce: str, token: str, canaries: dict[str, str]) -> Report:
    """Read the supervisor's line and the report in it, and check the canaries."""
    outer = _outer(printed, nonce)
    if exit_code != 0 or outer is None:
        return Report(faults=(f"the supervisor gave no answer of its own (exit code {exit_code})",))
    faults: list[str] = []
    if outer.get("timed_out"):
        faults.append("the tests did not end in time")
    if outer.get("flooded"):
        faults.append("the report is too long")
    if outer.get("status") != 0:
        faults.append(f"the tests' process did not exit cleanly (status {outer.get('status')})")
    lines = str(outer.get("report", "")).splitlines()
    records = [record for line in lines if (record := _record(line, token)) is not None]
    if len(records) != len(lines):
        faults.append(f"{len(lines) - len(records)} lines of the report are not the test runner's")
    tests = [record for record in records if "id" in record]
    if not records or records[-1].get("end") != len(tests) or len(records) != len(tests) + 1:
        faults.append("the report has no true end mark")
    repeated = [name for name, count in Counter(record["id"] for record in tests).items() if count > 1]
    if repeated:
        faults.append(f"reported more than once: {', '.join(repeated[:3])}")
    outcomes = {record["id"]: record["outcome"] for record in tests}
    wrong = [name for name, outcome in canaries.items() if outcomes.pop(name, None) != outcome]
    if wrong:
        faults.append(f"{len(wrong)} of {len(canaries)} tests of known outcome came out otherwise: the test framework was tampered with")
    seconds = sum(record["seconds"] for record in tests)
    return Report(outcomes, tuple(faults), bool(outer.get("other_user")), seconds, str(outer.get("log", "")))


def judge(report: Report, expectation: Expectation) -> Verdict:
    """1.0 where the report has no fault and says that every expected test passed, else 0.0 with the reason."""
    passed = {name for name, outcome in report.outcomes.items() if outcome == "passed"} if not report.faults else set()
    fixed, kept = len(passed & expectation.fail_to_pass), len(passed & expectation.pass_to_pass)
    counts = (fixed, len(expectation.fail_to_pass)), (kept, len(expectation.pass_to_pass))
    if report.faults:
        return Verdict(0.0, "; ".join(report.faults), *counts)
    if not expectation.fail_to_pass:
        return Verdict(0.0, "the task has no test that the fix turns from failing to passing", *counts)
    broken = len(expectation.pass_to_pass) - kept
    missing = len(expectation.fail_to_pass) - fixed
    if broken or missing:
        reasons = [f"{missing} of {len(expectation.fail_to_pass)} tests of the fix do not pass"] if missing else []
        reasons += [f"{broken} tests that passed before do not pass"] if broken else []
        return Verdict(0.0, "; ".join(reasons), *counts)
    known = expectation.fail_to_pass | expectation.pass_to_pass | expectation.others
    unknown = sorted(report.outcomes.keys() - known)
    if unknown:
        return Verdict(0.0, f"reported but not asked for: {', '.join(unknown[:3])}", *counts)
    return Verdict(1.0, "", *counts)


def _outer(printed: bytes, nonce: str) -> dict[str, Any] | None:
    """The one line that carries the nonce; None if there is none, or anything else was printed."""
    try:
        outer = json.loads(printed)
    except (ValueError, RecursionError):
        return None
    return outer if isinstance(outer, dict) and outer.get("nonce") == nonce else None


def _record(line: str, token: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("token") != token:
        return None
    if record.keys() == {"token", "end"} and type(record["end"]) is int:
        return record
    if record.keys() != {"token", "id", "outcome", "seconds"} or not isinstance(record["id"], str):
        return None
    if not isinstance(record["outcome"], str) or record["outcome"] not in _OUTCOMES or not isinstance(record["seconds"], (int, float)):
        return None
    return record
