"""An edge in a process of its own that packs and forks until it is killed: `python branching_edge.py STATE RUN`.

Prints a line for each thing it was told.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

from dsec.edge import build_edge
from libdsec.schema import ContainerRunArgs, CreateRequest, ExecRequest, ForkRequest, PackRequest


def say(*words: object) -> None:
    print(*words, flush=True)


async def lane(edge, number: int) -> None:
    args = ContainerRunArgs(container_image="tiny", memory_limit_mb=64, disk_limit_mb=64)
    made = await edge.create(CreateRequest(args=args))
    parent = made.sandboxes[0].sandbox_id
    say("made", parent)
    for turn in itertools.count():
        text = f"{number}-{turn}"
        await edge.exec(parent, ExecRequest(shell=f"echo {text} > /t/turn; dd if=/dev/urandom of=/t/big bs=64k count=40 2>/dev/null"))
        op_id = f"pack-{text}"
        say("asked", op_id)
        info = await edge.pack_diff(parent, PackRequest(name=f"lane-{text}", op_id=op_id))
        say("taken", op_id, text)
        forked = await edge.fork(parent, ForkRequest(count=1 + turn % 3), f"fork-{text}")
        for child in forked.sandboxes:
            say("made", child.sandbox_id, text)
        info = await edge.pack_info(op_id, wait=60)
        say("packed", op_id, text, info.state)
        old, parent = parent, forked.sandboxes[0].sandbox_id
        for sandbox_id in [old, *(child.sandbox_id for child in forked.sandboxes[1:])]:
            say("stopping", sandbox_id)
            await edge.stop(sandbox_id)


async def main() -> None:
    state, run = sys.argv[1:]
    edge = build_edge(SimpleNamespace(state=Path(state), run=Path(run), store=None))
    await edge.open()
    say("open")
    await asyncio.gather(*(lane(edge, number) for number in range(3)))


asyncio.run(main())
