"""The verdict from what was printed: forged, cut, doubled and honest reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from examples.rollouts.verdict import Expectation, Report, judge, parse

NONCE, TOKEN = "n" * 32, "t" * 32
CANARIES = {"test_c.C.test_bad": "failed", "test_c.C.test_good": "passed"}
TESTS = {"tests.T.test_fix": "passed", "tests.T.test_old": "passed", "tests.T.test_skip": "skipped"}
EXPECTATION = Expectation(frozenset({"tests.T.test_fix"}), frozenset({"tests.T.test_old"}), frozenset({"tests.T.test_skip"}))


def _lines(outcomes: dict[str, str], token: str = TOKEN) -> list[str]:
    records: list[dict[str, Any]] = [{"token": token, "id": name, "outcome": how, "seconds": 0.1} for name, how in outcomes.items()]
    return [json.dumps(record) for record in [*records, {"token": token, "end": len(records)}]]


def _printed(lines: list[str], **changes: Any) -> bytes:
    outer = {"nonce": NONCE, "status": 0, "timed_out": False, "flooded": False, "other_user": True, "report": "\n".join(lines), "log": ""}
    return json.dumps(outer | changes).encode() + b"\n"


def _verdict(printed: bytes, exit_code: int | None = 0) -> tuple[float, str]:
    verdict = judge(parse(printed, exit_code, nonce=NONCE, token=TOKEN, canaries=CANARIES), EXPECTATION)
    return verdict.reward, verdict.reason


HONEST = _lines({**TESTS, **CANARIES})


def test_a_report_that_holds_together_earns() -> None:
    report = parse(_printed(HONEST), 0, nonce=NONCE, token=TOKEN, canaries=CANARIES)
    assert report == Report(TESTS, (), True, pytest.approx(0.5), "")
    verdict = judge(report, EXPECTATION)
    assert (verdict.reward, verdict.fail_to_pass, verdict.pass_to_pass) == (1.0, (1, 1), (1, 1))


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped", "xfailed", "xpassed", "none"])
@pytest.mark.parametrize("name", ["tests.T.test_fix", "tests.T.test_old"])
def test_an_expected_test_that_did_not_pass_earns_nothing(name: str, outcome: str) -> None:
    reward, reason = _verdict(_printed(_lines({**TESTS, name: outcome, **CANARIES})))
    assert reward == 0.0
    assert "not pass" in reason


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (b"", "no answer of its own"),
        (b"OK\n", "no answer of its own"),
        (b"[" * 100_000, "no answer of its own"),
        (_printed(HONEST, nonce="x" * 32), "no answer of its own"),
        (_printed(HONEST) + _printed(HONEST), "no answer of its own"),
        (b'{"reward": 1.0}\n' + _printed(HONEST), "no answer of its own"),
        (_printed(HONEST, status=1), "did not exit cleanly"),
        (_printed(HONEST, status=-9), "did not exit cleanly"),
        (_printed(HONEST, status=None), "did not exit cleanly"),
        (_printed(HONEST, timed_out=True), "did not end in time"),
        (_printed(HONEST, flooded=True), "too long"),
        (_printed([]), "no true end mark"),
        (_printed(HONEST[:-1]), "no true end mark"),
        (_printed([*HONEST[:-1], json.dumps({"token": TOKEN, "end": 4})]), "no true end mark"),
        (_printed([HONEST[-1], *HONEST[:-1]]), "no true end mark"),
        (_printed([*HONEST, *HONEST]), "no true end mark"),
        (_printed([HONEST[0], *_lines({**TESTS, **CANARIES, "x": "passed"})]), "no true end mark"),
        (_printed(["not json", *HONEST]), "not the test runner's"),
        (_printed([json.dumps({"token": TOKEN, "id": 3, "outcome": "passed", "seconds": 0}), *HONEST]), "not the test runner's"),
        (_printed([json.dumps({"token": TOKEN, "id": "a", "outcome": ["passed"], "seconds": 0}), *HONEST]), "not the test runner's"),
        (_printed([json.dumps({"token": TOKEN, "end": True}), *HONEST]), "not the test runner's"),
        (_printed(_lines({**TESTS, **CANARIES}, token="u" * 32)), "not the test runner's"),
        (_printed(_lines(TESTS)), "2 of 2 tests of known outcome"),
        (_printed(_lines({**TESTS, **CANARIES, "test_c.C.test_bad": "passed"})), "1 of 2 tests of known outcome"),
        (_printed(_lines({**TESTS, **CANARIES, "test_c.C.test_good": "failed"})), "1 of 2 tests of known outcome"),
        (_printed(_lines({**TESTS, **CANARIES, "tests.T.test_made_up": "passed"})), "reported but not asked for"),
        (_printed(_lines(CANARIES)), "do not pass"),
    ],
)
def test_a_forged_or_broken_report_earns_nothing_and_says_why(printed: bytes, reason: str) -> None:
    reward, said = _verdict(printed)
    assert reward == 0.0
    assert reason in said


def test_a_test_reported_twice_earns_nothing() -> None:
    lines = [HONEST[0], *HONEST]
    lines[-1] = json.dumps({"token": TOKEN, "end": len(lines) - 1})
    reward, said = _verdict(_printed(lines))
    assert (reward, said) == (0.0, "reported more than once: tests.T.test_fix")


@pytest.mark.parametrize("exit_code", [1, 137, None])
def test_a_supervisor_that_did_not_end_well_earns_nothing(exit_code: int | None) -> None:
    assert _verdict(_printed(HONEST), exit_code)[0] == 0.0


def test_a_task_without_a_test_to_turn_earns_nothing() -> None:
    report = parse(_printed(HONEST), 0, nonce=NONCE, token=TOKEN, canaries=CANARIES)
    assert judge(report, Expectation(frozenset(), frozenset(TESTS))).reward == 0.0
