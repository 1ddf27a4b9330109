"""The honest scripted policies: one that knows the fix, one that does nothing, one that stops half-way."""

from __future__ import annotations

from collections.abc import Sequence

from ..agent import Agent
from ..fix import Edit
from ..task import Task

__all__ = ["behaviour", "idle", "oracle", "partial_fix"]


async def oracle(agent: Agent, task: Task, fix: Sequence[Edit]) -> None:
    """Look around as a person would, apply the real fix edit by edit, and run the project's own tests of what was changed."""
    await agent.call("search", pattern=r"def __setitem__", path=task.package_path)
    for edit in fix:
        await agent.call("edit", path=f"{task.package_path}/{edit.path}", old=edit.old, new=edit.new)
    await agent.run(
        f"cd {task.root} && git diff --stat && PYTHONPATH={task.import_root} python3 -B -m unittest -q tests.test_tlru", timeout=60
    )


async def idle(agent: Agent, task: Task) -> None:
    """Read the code and leave it as it is."""
    await agent.run(f"cd {task.root} && git log --oneline && git status --short")
    await agent.call("search", pattern="TLRUCache", path=task.package_path)


def behaviour(fix: Sequence[Edit]) -> list[Edit]:
    """The hunks that change what the code does; the release's number does not."""
    return [edit for edit in fix if "__version__" not in edit.new]


async def partial_fix(agent: Agent, task: Task, fix: Sequence[Edit], overlooked: Edit) -> None:
    """A plausible wrong fix: the real one without one of its hunks, as if that half of the report had been overlooked."""
    for edit in fix:
        if edit is not overlooked:
            await agent.call("edit", path=f"{task.package_path}/{edit.path}", old=edit.old, new=edit.new)
    await agent.run(f"cd {task.root} && PYTHONPATH={task.import_root} python3 -B -m unittest -q tests.test_lru", timeout=60)
