"""A real edge over real containers, killed in the middle of its work: no result is lost, nothing is left over."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.edge import build_edge
from dsec.environments import EnvironmentStore, ScratchStore, build
from libdsec.schema import ExecRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("restart_edge.py")
ALIVE = ("running", "pausing", "paused", "resuming")


@pytest.fixture
def home(state_run, tiny_rootfs):
    environments = EnvironmentStore(state_run.state, state_run.run)
    build(environments, "tiny", source=f"dir:{tiny_rootfs}", kind="base")
    yield state_run
    environments.sweep_mounts([])
    ScratchStore(state_run.state, state_run.run).close(unmount=True)


class Settings:
    """Of the node under test."""

    def __init__(self, home) -> None:
        self.state = home.state
        self.run = home.run
        self.store = None


@asynccontextmanager
async def opened(home):
    """An edge that stops all sandboxes in the end."""
    edge = build_edge(Settings(home))
    await edge.open()
    try:
        yield edge
        await asyncio.gather(*(edge.stop(info.sandbox_id) for info in await edge.list() if info.state in ALIVE))
        assert await edge._core.backends["container"].owned() == set()
    finally:
        await edge.aclose()


def run_and_kill(home, job: str, enough) -> list[list[str]]:
    """What the edge said until `enough(its lines)`, when it was killed, and in the pipe then."""
    command = [sys.executable, str(SCRIPT), str(home.state), str(home.run), job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        said: list[list[str]] = []
        try:
            while not enough(said):
                line = child.stdout.readline()
                assert line, f"the edge ended by itself, having said {said}"
                said.append(line.split())
        finally:
            child.kill()
        return said + [line.split() for line in child.stdout.read().splitlines()]


def counted(said: list[list[str]], word: str) -> int:
    return sum(1 for line in said if line[0] == word)


@pytest.mark.parametrize(
    "enough",
    [
        pytest.param(lambda said: counted(said, "running") == 1, id="all-running"),
        pytest.param(lambda said: counted(said, "ended") >= 100, id="half-ended"),
    ],
)
async def test_two_hundred_running_commands_lose_nothing(home, enough):
    said = await asyncio.to_thread(run_and_kill, home, "commands", enough)
    sandboxes = [line[1] for line in said if line[0] == "made"]
    assert len(sandboxes) == 10
    async with opened(home) as edge:
        assert {info.sandbox_id for info in await edge.list() if info.state == "running"} == set(sandboxes)

        async def check(number: int) -> None:
            result = await edge.result(sandboxes[number % 10], f"op-{number}", wait=30)
            assert result.exit_code == number % 100
            assert result.stdout == f"begin {number}\nend {number}\n".encode()
            assert result.replayed

        await asyncio.gather(*(check(number) for number in range(200)))
        for sandbox_id in sandboxes:
            rows = await edge.processes(sandbox_id)
            assert [row.state for row in rows] == ["exited"] * 20
            # Once on record they are forgotten inside, and new ones run.
            channel = edge._core.sandboxes[sandbox_id].channel
            assert (await edge.exec(sandbox_id, ExecRequest(argv=["true"]))).exit_code == 0
            deadline = asyncio.get_running_loop().time() + 5
            while await channel.sessions():
                assert asyncio.get_running_loop().time() < deadline, "results on record are still held inside"
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("lines", [2, 9, 30, 77, 150])
async def test_killed_while_sandboxes_come_and_go_it_leaves_only_those_it_told_of(home, lines):
    said: list[list[str]] = []
    for _ in range(2):
        said += await asyncio.to_thread(run_and_kill, home, "churn", lambda lines_now: len(lines_now) >= lines)
    told = {line[1] for line in said if line[0] == "made"}
    stopping = {line[1] for line in said if line[0] == "stopping"}
    stopped = {line[1] for line in said if line[0] == "stopped"}
    async with opened(home) as edge:
        states = {info.sandbox_id: info.state for info in await edge.list()}
        deadline = asyncio.get_running_loop().time() + 10
        while "stopping" in states.values():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
            states = {info.sandbox_id: info.state for info in await edge.list()}
        alive = {sandbox_id for sandbox_id, state in states.items() if state in ALIVE}
        assert told - stopping <= alive
        assert {states[sandbox_id] for sandbox_id in stopped} <= {"stopped"}
        # An answer that was ready and could not be written any more: at most one creation of three a lane, in each of the two lives.
        assert len(alive - told) <= 2 * 4 * 3
        assert await edge._core.backends["container"].owned() == alive
        for sandbox_id in sorted(alive)[:5]:
            assert (await edge.exec(sandbox_id, ExecRequest(argv=["true"]))).exit_code == 0
