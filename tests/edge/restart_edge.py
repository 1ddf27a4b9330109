"""An edge in a process of its own, to be killed: `python restart_edge.py STATE RUN JOB`. Prints a line for each thing it was told."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

from dsec.edge import build_edge
from libdsec.schema import ContainerRunArgs, CreateRequest, ExecRequest


def say(*words: object) -> None:
    print(*words, flush=True)


def tiny(count: int = 1) -> CreateRequest:
    return CreateRequest(args=ContainerRunArgs(container_image="tiny", memory_limit_mb=64, disk_limit_mb=16), count=count)


async def commands(edge) -> None:
    """200 commands in ten sandboxes; they last one to three seconds."""
    sandboxes = [info.sandbox_id for info in (await edge.create(tiny(10))).sandboxes]
    for sandbox_id in sandboxes:
        say("made", sandbox_id)

    async def one(number: int) -> None:
        request = ExecRequest(
            shell=f"echo begin {number}; sleep {1 + number % 20 / 10}; echo end {number}; exit {number % 100}", op_id=f"op-{number}"
        )
        result = await edge.exec(sandboxes[number % 10], request)
        say("ended", number, result.exit_code)

    tasks = [asyncio.ensure_future(one(number)) for number in range(200)]
    running = 0
    while running < 150:
        running = 0
        for sandbox_id in sandboxes:
            running += len([session for session in await edge._core.sandboxes[sandbox_id].channel.sessions() if session.running])
    say("running")
    await asyncio.gather(*tasks)
    say("all")


async def churn(edge) -> None:
    """Sandboxes come, work and go, until the end."""

    async def one(lane: int) -> None:
        while True:
            result = await edge.create(tiny(1 + lane % 3))
            for info in result.sandboxes:
                say("made", info.sandbox_id)
            for info in result.sandboxes:
                await edge.exec(info.sandbox_id, ExecRequest(argv=["true"]))
                if lane == 0:
                    await edge.pause(info.sandbox_id)
            for info in result.sandboxes:
                say("stopping", info.sandbox_id)
                await edge.stop(info.sandbox_id)
                say("stopped", info.sandbox_id)

    await asyncio.gather(*(one(lane) for lane in range(4)))


async def main() -> None:
    state, run, job = sys.argv[1:]
    edge = build_edge(SimpleNamespace(state=Path(state), run=Path(run), store=None))
    await edge.open()
    say("open")
    await {"commands": commands, "churn": churn}[job](edge)


asyncio.run(main())
