"""A server that is killed with -9 loses no client anything: it is found again, and its records are asked for."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libdsec import ConnectionFailed, DSecClient, OutcomeUnknown, Timeouts

SCRIPT = Path(__file__).parent / "durable_server.py"


class Server:
    """A real process with the API on a Unix socket."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "dsec.sock"
        self.records = folder / "records"
        self.records.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        command = [sys.executable, str(SCRIPT), str(self.path), str(self.records)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def serving(self) -> None:
        await poll(self.listens)

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.path)) == 0

    def begun(self) -> int:
        return len(os.listdir(self.records))


async def poll(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    made.start()
    yield made
    made.kill()


@pytest.mark.slow
@pytest.mark.parametrize("begun_before_the_kill", [200, 40])
async def test_killed_in_the_middle_of_200_commands_no_result_is_lost(server, begun_before_the_kill):
    await server.serving()
    async with DSecClient(server.url) as client:
        sandbox = await client.get("sb-durable")
        running = [asyncio.ensure_future(sandbox.run_shell(f"echo x >>runs; sleep 1.5; echo {i}; exit {i % 7}")) for i in range(200)]
        await poll(lambda: server.begun() >= begun_before_the_kill)
        server.kill()
        server.start()
        results = await asyncio.gather(*running)
    assert [(result.stdout, result.exit_code) for result in results] == [(f"{i}\n".encode(), i % 7) for i in range(200)]
    assert all((server.records / result.op_id / "runs").read_text() == "x\n" for result in results)


@pytest.mark.slow
async def test_reads_and_starts_wait_for_a_server_that_comes_back(server):
    await server.serving()
    async with DSecClient(server.url) as client:
        sandbox = await client.get("sb-durable")
        server.kill()
        asking = asyncio.ensure_future(sandbox.info())
        starting = asyncio.ensure_future(sandbox.start(shell="echo started"))
        await asyncio.sleep(0)
        server.start()
        assert (await asking).state == "running"
        process = await starting
        assert (await process.wait(10)).stdout == b"started\n"


@pytest.mark.slow
async def test_a_server_that_stays_away_leaves_an_outcome_unknown(server):
    await server.serving()
    async with DSecClient(server.url, timeouts=Timeouts(reconnect=0.3)) as client:
        sandbox = await client.get("sb-durable")
        running = asyncio.ensure_future(sandbox.run_shell("sleep 1; echo done", op_id="gone"))
        await poll(lambda: server.begun() == 1)
        server.kill()
        with pytest.raises(OutcomeUnknown) as caught:
            await running
        assert caught.value.details == {"op_id": "gone"}
        with pytest.raises(ConnectionFailed) as away:
            await sandbox.run_shell("true")
        assert away.value.ran == "not-run"
        server.start()
        await server.serving()
        assert (await sandbox.result("gone", wait=10)).stdout == b"done\n"


async def test_no_server_is_told_at_once(tmp_path):
    begun = time.monotonic()
    with pytest.raises(ConnectionFailed) as caught:
        async with DSecClient(f"unix://{tmp_path}/none"):
            pass
    assert caught.value.ran == "not-run"
    assert time.monotonic() - begun < 2
