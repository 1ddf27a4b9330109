"""An edge that is killed while it packs and forks: what was told is kept, what was not is gone, what was begun is finished."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from libdsec.errors import NotFound
from libdsec.schema import PackRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("branching_edge.py")


def run_and_kill(home, after: int) -> list[list[str]]:
    """What the edge said before it was killed, at its line number `after`."""
    said: list[list[str]] = []
    command = [sys.executable, str(SCRIPT), str(home.state), str(home.run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            while len(said) < after and (line := child.stdout.readline()):
                said.append(line.split())
        finally:
            child.kill()
        said += [line.split() for line in child.stdout.read().splitlines()]
    return said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(int(os.environ.get("DSEC_CRASHES", "4"))))
async def test_a_killed_edge_loses_no_pack_and_leaves_no_snapshot(home, open_node, until, seed):
    said = run_and_kill(home, random.Random(seed).randint(4, 40))
    assert said[0] == ["open"]
    stopping = {words[1] for words in said if words[0] == "stopping"}
    made = {words[1]: words[2:] for words in said if words[0] == "made" and words[1] not in stopping}
    taken = {words[1]: words[2] for words in said if words[0] == "taken"}
    async with open_node(home) as node:
        known = {info.sandbox_id: info.state for info in await node.edge.list()}
        for sandbox_id, text in made.items():
            assert known[sandbox_id] == "running"
            if text:
                # it may have gone on as the next parent
                lane, turn = map(int, text[0].split("-"))
                found = list(map(int, (await node.box(sandbox_id).sh("cat /t/turn")).split("-")))
                assert found in ([lane, turn], [lane, turn + 1])
        for op_id, text in taken.items():
            info = await node.edge.pack_info(op_id, wait=60)
            assert info.state == "published", info
            # the repeated id is the record, though its sandbox may be gone
            again = await node.edge.pack_diff(info.sandbox_id, PackRequest(name=info.name, op_id=op_id))
            assert again.digest == info.digest
            restored = await node.create(info.name)
            assert await restored.sh("cat /t/turn; wc -c < /t/big") == f"{text}\n{64 * 40 * 1024}\n"
            await restored.stop()
        for op_id in {words[1] for words in said if words[0] == "asked"} - taken.keys():
            # it was not begun, or its answer was on its way
            try:
                assert (await node.edge.pack_info(op_id, wait=60)).state == "published"
            except NotFound:
                continue
        await until(node.nothing_packs)
        lanes = node.backend._scratch.path / ".lanes"
        assert [name for lane in lanes.iterdir() for name in os.listdir(lane)] == []


async def test_a_sandbox_that_stood_when_the_edge_died_goes_on(node):
    box = await node.create()
    await box.sh("echo kept > /t/file")
    # as it is in the window of a snapshot
    node.backend._cgroups.freeze(box.id)
    await node.restart()
    assert not node.backend._cgroups.frozen(box.id)
    assert await box.sh("cat /t/file", timeout=10) == "kept\n"


async def test_an_edge_that_ends_while_it_packs_finishes_it_at_the_next_start(node):
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=60 2>/dev/null; for i in $(seq 500); do echo $i > /t/$i; done")
    begun = await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
    await node.restart()
    info = await node.edge.pack_info(begun.op_id, wait=60)
    assert info.state == "published", info
    assert await (await node.create(info.name)).sh("ls /t | wc -l; cat /t/77") == "501\n77\n"


async def test_a_pack_does_not_outlive_its_host(node):
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=60 2>/dev/null")
    begun = await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
    await node.edge.aclose()
    with closing(sqlite3.connect(node.home.state / "edge.db")) as journal, journal:
        journal.execute("UPDATE meta SET value='another' WHERE name='boot_id'")
    await node.open()
    info = await node.edge.pack_info(begun.op_id, wait=60)
    assert (info.state, info.error.code, info.error.cause) == ("failed", "sandbox_failed", "node-lost")
