"""The harness alone: its tools, over its own protocol, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from examples.rollouts.agent import Agent, HarnessLost, ToolFailed


async def test_edit_replaces_text_that_occurs_once(agent: Agent, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(b"one\r\ntwo\r\n")
    await agent.call("edit", path=str(file), old="two", new="three")
    assert file.read_bytes() == b"one\r\nthree\r\n"


@pytest.mark.parametrize(("old", "words"), [("x", "occurs more than once"), ("nothing", "does not occur")])
async def test_edit_refuses_text_that_is_not_unique(agent: Agent, tmp_path: Path, old: str, words: str) -> None:
    file = tmp_path / "a.py"
    file.write_text("x x")
    with pytest.raises(ToolFailed, match=words):
        await agent.call("edit", path=str(file), old=old, new="y")
    assert file.read_text() == "x x"


async def test_edit_with_nothing_to_replace_makes_a_new_file_only(agent: Agent, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "new.py"
    await agent.call("edit", path=str(file), old="", new="x = 1\n")
    assert file.read_text() == "x = 1\n"
    with pytest.raises(ToolFailed, match="exists already"):
        await agent.call("edit", path=str(file), old="", new="x = 2\n")


async def test_search_gives_file_line_and_text(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\ndef find_me(): pass\n")
    (tmp_path / "b.bin").write_bytes(b"\0find_me")
    result = await agent.call("search", pattern=r"find_\w+", path=str(tmp_path))
    assert result == {"matches": [f"{tmp_path}/a.py:2: def find_me(): pass"], "more": False}


async def test_search_refuses_a_bad_pattern(agent: Agent) -> None:
    with pytest.raises(ToolFailed, match="bad pattern"):
        await agent.call("search", pattern="(")


async def test_read_gives_a_window_of_lines(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(1, 11)))
    assert await agent.call("read", path=str(tmp_path / "a.txt"), start=4, lines=2) == {"text": "line 4\nline 5\n", "lines": 10}


async def test_run_tells_exit_code_and_both_streams(agent: Agent) -> None:
    result = await agent.call("run", command="echo out; echo err >&2; exit 3")
    assert result == {"exit_code": 3, "timed_out": False, "output": "out\nerr\n"}


async def test_run_keeps_head_and_tail_of_long_output(agent: Agent) -> None:
    output = await agent.run("echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert output.startswith("first\n")
    assert output.endswith("last\n")
    assert "bytes left out" in output
    assert len(output) < 40_000


@pytest.mark.slow
async def test_run_past_its_deadline_is_killed_with_its_children(agent: Agent, tmp_path: Path) -> None:
    result = await agent.call("run", command=f"sleep 321 & echo $! > {tmp_path}/pid; wait", timeout=0.3)
    assert result["timed_out"]
    pid = int((tmp_path / "pid").read_text())
    assert await asyncio.to_thread(_gone_within, pid, 5.0)


def _gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_background_child_does_not_hold_the_answer_back(agent: Agent, tmp_path: Path) -> None:
    async with asyncio.timeout(10):
        await agent.run(f"sleep 322 & echo $! > {tmp_path}/pid")
    pid = int((tmp_path / "pid").read_text())
    assert _alive(pid)
    os.kill(pid, 9)


@pytest.mark.parametrize("tool", ["no-such-tool", "edit"])
async def test_a_bad_request_is_answered_and_the_harness_lives_on(agent: Agent, tool: str) -> None:
    with pytest.raises(ToolFailed):
        await agent.call(tool, unknown=1)
    assert await agent.run("echo alive") == "alive\n"


async def test_a_harness_that_is_killed_is_lost_not_waited_for(agent: Agent) -> None:
    with pytest.raises(HarnessLost, match="the harness ended"):
        await agent.call("run", command="kill -9 $PPID")


async def test_steps_are_kept_and_bounded(agent: Agent) -> None:
    agent.max_steps = 2
    await agent.run("echo a")
    with pytest.raises(ToolFailed):
        await agent.call("read", path="/nonexistent")
    assert [(step.tool, step.ok) for step in agent.steps] == [("run", True), ("read", False)]
    with pytest.raises(HarnessLost, match="more than 2 steps"):
        await agent.run("echo b")
