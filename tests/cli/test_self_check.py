"""The contract of a sandbox, on the container backend: every check is a test here."""

from __future__ import annotations

import asyncio

import pytest

from dsec.testing import CheckOutcome, check_names, self_check
from dsec.testing.trial import CHECKS, check, holds
from libdsec import DSecClient, DSecContainerRunArgs

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(node) -> dict[str, CheckOutcome]:
    async def run() -> list[CheckOutcome]:
        async with DSecClient(node.url) as client:
            return await self_check(client, DSecContainerRunArgs(container_image="tiny"))

    return {outcome.name: outcome for outcome in asyncio.run(run())}


@pytest.mark.parametrize("name", check_names())
def test_container(outcomes: dict[str, CheckOutcome], name: str) -> None:
    outcome = outcomes[name]
    if outcome.verdict == "skipped":
        pytest.skip(outcome.detail)
    assert outcome.verdict == "passed", outcome.detail


async def test_a_check_that_fails_or_crashes_is_an_outcome(node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.testing.suite.CHECKS", checks := [])
    kept = list(CHECKS)

    @check()
    async def does_not_hold(trial) -> None:
        holds(False, "it was seen otherwise")

    @check()
    async def has_a_bug(trial) -> None:
        raise KeyError("bug")

    @check("no-such-capability")
    async def needs_more(trial) -> None:
        holds(True, "")

    checks += [each for each in CHECKS if each not in kept]
    CHECKS[:] = kept
    async with DSecClient(node.url) as client:
        told: list[str] = []
        found = await self_check(client, DSecContainerRunArgs(container_image="tiny"), on_outcome=lambda outcome: told.append(outcome.name))
        assert [info for info in await client.list() if info.state not in ("stopped", "failed")] == []
    assert [outcome.verdict for outcome in found] == ["failed", "failed", "passed"]
    assert "otherwise" in found[0].detail
    assert "KeyError" in found[1].detail
    assert told == ["does-not-hold", "has-a-bug", "needs-more"]
