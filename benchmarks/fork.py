"""Branching a sandbox: `python -m benchmarks.fork --json`.

A parent has just written `--dirty-mb`, which the disk does not have yet. `fork_1` and `fork_N` end when every child has answered a command
that looks at what the parent wrote; `ready` is when fork() has returned. `pack_diff` ends when the layer is published; `stopped` is how
long the parent's processes stood, by the server and by a process of the parent that watched the clock. `restore` ends with the first
command's answer: the first of a layer, which the node has not mounted yet, and another.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from benchmarks.budgets import at_most
from benchmarks.measure import Block, Series, run_rounds
from benchmarks.peers import Peer
from benchmarks.stage import Stage, arguments, main, open_stage
from libdsec import Sandbox

__all__ = ["measure"]

DIRTY = "/root/dirty"
LOOK = ["test", "-s", DIRTY]
ENOUGH = "/tmp/enough"
WATCH = f"""
import os, time
worst, last = 0.0, time.monotonic()
while not os.path.exists({ENOUGH!r}):
    time.sleep(0.0005)
    now = time.monotonic()
    worst, last = max(worst, now - last), now
print(worst)
"""


def write_dirty(size_mb: int) -> list[str]:
    """The command by which parents get something to inherit; each run writes it anew."""
    return ["dd", "if=/dev/urandom", f"of={DIRTY}", "bs=1M", f"count={size_mb}", "status=none"]


class Forks:
    """The parent, and what is done with it. Each method is one round of one or more series."""

    def __init__(self, options: argparse.Namespace, stage: Stage, parent: Sandbox) -> None:
        self._options, self._stage, self._parent = options, stage, parent
        self._names = (f"fork-{number}" for number in itertools.count())
        self.ready, self.stopped, self.gap, self.again = Series(), Series(), Series(), Series()
        self.packed: dict[str, Any] = {}

    async def write(self) -> None:
        """100 MB of news in the parent's page cache."""
        (await self._parent.exec(write_dirty(self._options.dirty_mb), timeout=120)).check()

    async def fork(self, count: int, times: int, *, fresh: bool) -> Block:
        """`times` forks into `count`; latency to the last child's first answer, and in `ready` that of fork() where `count` is many."""
        block, ready = Block(), Block()
        for _ in range(times):
            if fresh:
                await self.write()
            started = time.perf_counter()
            children = await self._parent.fork(count, timeout=300)
            returned = time.perf_counter() - started
            try:
                results = await asyncio.gather(*(child.exec(LOOK) for child in children))
                took = time.perf_counter() - started
            finally:
                await asyncio.gather(*(child.stop() for child in children))
            failed = sum(result.exit_code != 0 for result in results)
            block.failures += failed
            block.first_error = "a child does not see what its parent wrote" if failed else block.first_error
            block.samples_ms.append(took * 1e3)
            block.wall_s += took
            ready.samples_ms.append(returned * 1e3)
            ready.wall_s += returned
        if count > 1 and fresh:
            self.ready.blocks.append(ready)
        return block

    async def pack(self, times: int) -> Block:
        """Layers of a parent that goes on, each after it has written all anew; their first and second restore are in other series."""
        block, stopped, gap = Block(), Block(), Block()
        for _ in range(times):
            await self.write()
            watch = asyncio.create_task(self._parent.exec(["python3", "-c", WATCH], timeout=120))
            await asyncio.sleep(0.2)
            name = next(self._names)
            started = time.perf_counter()
            info = await self._parent.pack_diff(name)
            took = time.perf_counter() - started
            (await self._parent.exec(["touch", ENOUGH])).check()
            seen = (await watch).check()
            (await self._parent.exec(["rm", ENOUGH])).check()
            block.samples_ms.append(took * 1e3)
            stopped.wall_s = gap.wall_s = block.wall_s = block.wall_s + took
            stopped.samples_ms.append(info.stopped_ms)
            gap.samples_ms.append(float(seen.stdout) * 1e3)
            self.packed = {"files": info.files, "logical_mb": round(info.logical_bytes / 1e6, 1), "new_mb": round(info.new_bytes / 1e6, 1)}
            self._latest = name
        self.stopped.blocks.append(stopped)
        self.gap.blocks.append(gap)
        return block

    async def restore(self, times: int) -> Block:
        """First of a layer that is packed for it, then `times` more of the same."""
        await self.pack(1)
        first, again = Block(), Block()
        for block, count in ((first, 1), (again, times)):
            for _ in range(count):
                started = time.perf_counter()
                sandbox = await self._stage.client.restore(self._latest, self._stage.run_args())
                try:
                    result = await sandbox.exec(LOOK)
                    took = time.perf_counter() - started
                finally:
                    await sandbox.stop()
                block.failures += result.exit_code != 0
                block.samples_ms.append(took * 1e3)
                block.wall_s += took
        self.again.blocks.append(again)
        return first


class PeerForks:
    """The same by a peer that commits a container's files as an image."""

    def __init__(self, peer: Peer, dirty_mb: int) -> None:
        self._peer, self._dirty_mb = peer, dirty_mb
        self._names = (f"dsec-bench-fork-{number}" for number in itertools.count())
        self.commits = Series()

    async def fork(self, count: int) -> Block:
        """One commit and `count` containers of it, until each has answered; removal not in the time."""
        parent = await self._peer.start()
        children: list[str] = []
        try:
            await self._peer.run(parent, write_dirty(self._dirty_mb))
            name = next(self._names)
            started = time.perf_counter()
            committed = await self._peer.commit(parent, name)

            async def child() -> None:
                children.append(await self._peer.start_from(name))
                await self._peer.run(children[-1], LOOK)

            await asyncio.gather(*(child() for _ in range(count)))
            took = time.perf_counter() - started
        finally:
            for sandbox in (parent, *children):
                await self._peer.remove(sandbox)
        self.commits.blocks.append(Block([committed * 1e3], wall_s=committed))
        return Block([took * 1e3], wall_s=took)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything in rounds, with the peers."""
    async with open_stage(options.peers) as stage:
        parent = await stage.client.run_container(stage.run_args(memory_limit_mb=2048, cpu_cores_limit=2.0))
        forks = Forks(options, stage, parent)
        peers = {name: PeerForks(peer, options.dirty_mb) for name, peer in stage.peers.items() if "fork" in peer.how}
        await forks.write()
        await forks.fork(1, 2, fresh=False)
        many = f"fork_{options.children}"
        things: dict[str, Callable[[], Awaitable[Block]]] = {
            "fork_1": lambda: forks.fork(1, options.n, fresh=True),
            "fork_1_settled": lambda: forks.fork(1, options.n, fresh=False),
            many: lambda: forks.fork(options.children, 1, fresh=True),
            f"{many}_settled": lambda: forks.fork(options.children, 1, fresh=False),
            "pack_diff": lambda: forks.pack(options.n),
            "restore": lambda: forks.restore(options.n),
        }
        for name, peer in peers.items():
            things[f"{name} fork_1"] = partial(peer.fork, 1)
            things[f"{name} {many}"] = partial(peer.fork, options.children)
        series = await run_rounds(options.rounds, things, options.surroundings)
        stage.daemon.sample_peaks()
        await parent.stop()
        return _document(options, stage, series, forks, peers, many)


def _document(
    options: argparse.Namespace, stage: Stage, series: dict[str, Series], forks: Forks, peers: dict[str, PeerForks], many: str
) -> dict[str, Any]:
    done = {name: _brief(one) for name, one in series.items()}
    dsec = {name: document for name, document in done.items() if " " not in name}
    dsec[many] |= {"ready": _brief(forks.ready)}
    dsec["pack_diff"] |= {"stopped": _brief(forks.stopped), "watched_gap": _brief(forks.gap), "layer": forks.packed}
    dsec["restore"] |= {"again": _brief(forks.again)}
    measured = {
        name: {
            "fork_1": done[f"{name} fork_1"],
            many: done[f"{name} {many}"],
            "commit": _brief(peer.commits),
            "how": stage.peers[name].how["fork"],
        }
        for name, peer in peers.items()
    }
    return {
        "n": options.n,
        "rounds": options.rounds,
        "children": options.children,
        "dirty_mb": options.dirty_mb,
        "root": stage.root.to_json(),
        "dsec": dsec
        | {
            "how": "libdsec fork, pack_diff, restore; settled: what the parent wrote was there at the fork before",
            "peak_rss_mb": stage.daemon.peak_rss_mb(),
        },
        "peers": {
            name: measured.get(name) or {"absent": stage.absent.get(name, f"{name} keeps no sandbox's files")}
            for name in options.peers.split(",")
            if name
        },
        "budgets": {
            "pack_diff_stopped_p99_ms": at_most(dsec["pack_diff"]["stopped"].get("p99_ms"), 10, "ms"),
            f"{many}_ready_p50_ms": at_most(dsec[many]["ready"].get("p50_ms"), 300 * options.children / 100, "ms"),
            "restore_p50_ms": at_most(dsec["restore"].get("p50_ms"), 30, "ms"),
            "restore_again_p50_ms": at_most(dsec["restore"]["again"].get("p50_ms"), 5, "ms"),
            "failures": at_most(sum(document["failures"] for document in dsec.values() if "failures" in document), 0),
        },
    }


def _brief(series: Series) -> dict[str, Any]:
    document = series.to_json()
    for name in ("per_s", "p90_ms", "p50_ms_by_round"):
        document.pop(name, None)
    return document


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.set_defaults(peers="docker", rounds=3)
    parser.add_argument("-n", type=int, default=10, help="of each in each round but the forks into many")
    parser.add_argument("--children", type=int, default=100, help="of the fork into many; its budget grows with them")
    parser.add_argument("--dirty-mb", type=int, default=100, help="MiB that the parent has written")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args()
    if options.quick:
        options.n, options.rounds, options.children, options.dirty_mb = 2, 1, 10, 10
    main("fork", measure, options)
