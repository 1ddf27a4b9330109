"""The scripted policies on a small project, with the harness beside this process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples.rollouts.agent import Agent
from examples.rollouts.carry import Unacceptable, collect
from examples.rollouts.fix import Edit
from examples.rollouts.policies import SCRIPTED, Episode, available, make
from examples.rollouts.policies.tamperer import TAMPERINGS
from examples.rollouts.task import CACHETOOLS, Task

FIX = (Edit("__init__.py", "a - b", "a + b"), Edit("__init__.py", "2 * a", "a + a"))


def _source(task: Task) -> str:
    return Path(task.package_path, "__init__.py").read_text()


def _write(task: Task, name: str, text: str) -> None:
    Path(task.package_path, name).write_text(text)


@pytest.mark.slow
async def test_the_oracle_applies_the_fix_through_the_edit_tool(agent: Agent, task: Task, project_texts: dict[str, str]) -> None:
    policy, _ = make("oracle", Episode(task, FIX, 0))
    await policy(agent)
    assert _source(task) == project_texts["fixed"].replace("2 * a", "a + a")
    assert [step.tool for step in agent.steps].count("edit") == 2


@pytest.mark.slow
async def test_idle_changes_nothing(agent: Agent, task: Task, project_texts: dict[str, str]) -> None:
    policy, _ = make("idle", Episode(task, FIX, 0))
    await policy(agent)
    assert _source(task) == project_texts["broken"]
    assert agent.steps


@pytest.mark.slow
@pytest.mark.parametrize("variant", [0, 1])
async def test_the_wrong_fix_leaves_out_one_hunk_in_turn(agent: Agent, task: Task, project_texts: dict[str, str], variant: int) -> None:
    policy, _ = make("wrong", Episode(task, FIX, variant))
    await policy(agent)
    made = [project_texts["broken"].replace("2 * a", "a + a"), project_texts["fixed"]]
    assert _source(task) == made[variant]


async def test_the_wrong_fix_never_leaves_out_the_version_alone(agent: Agent, task: Task, project_texts: dict[str, str]) -> None:
    _write(task, "__init__.py", project_texts["broken"] + '__version__ = "1"\n')
    fix = (Edit("__init__.py", "a - b", "a + b"), Edit("__init__.py", '__version__ = "1"', '__version__ = "2"'))
    policy, _ = make("wrong", Episode(task, fix, 1))
    await policy(agent)
    assert "a - b" in _source(task)


@pytest.mark.parametrize("name", ["links out of the tree", "a pipe for a file", "flood of files"])
async def test_trees_that_tamperers_leave_are_not_carried(agent: Agent, task: Task, local_files: type, name: str) -> None:
    _write(task, "keys.py", "k = 1\n")
    pristine = {"__init__.py": _source(task).encode(), "keys.py": b"k = 1\n"}
    tampering = next(each for each in TAMPERINGS if each.name == name)
    await tampering.act(agent, task)
    try:
        with pytest.raises(Unacceptable):
            await collect(local_files(Path(task.package_path)), task.package_path, pristine)
    finally:
        shutil.rmtree(task.package_path)


def test_each_rollout_of_a_tamperer_tries_another_way() -> None:
    names = {make("tamperer", Episode(CACHETOOLS, FIX, variant))[1] for variant in range(len(TAMPERINGS))}
    assert names == {each.name for each in TAMPERINGS}
    assert len(names) == len(TAMPERINGS)


def test_policies_that_need_an_endpoint_are_there_only_with_one() -> None:
    endpoint = {"OPENAI_BASE_URL": "http://localhost:1/v1", "OPENAI_MODEL": "m"}
    assert available({}) == list(SCRIPTED)
    assert available(endpoint) == [*SCRIPTED, "openai"]
    assert make("openai", Episode(CACHETOOLS, FIX, 0), endpoint)[1] == "m"
    with pytest.raises(ValueError, match="policy 'openai' is not available"):
        make("openai", Episode(CACHETOOLS, FIX, 0), {})
