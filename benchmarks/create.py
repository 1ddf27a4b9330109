"""Create to first command answered: `python -m benchmarks.create -n 1000 -c 16 --json`.

`dsec` is with `-c` creations under way at once, `dsec_serial` one at a time; so are the peers and the floor. A latency ends when `true` has
answered; the sandbox is then stopped outside the latency but inside the round, so that `per_s` is of whole lives.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from benchmarks.budgets import at_most
from benchmarks.daemon import CpuMeter
from benchmarks.measure import Block, Series, percentile, run_block, run_rounds
from benchmarks.stage import Stage, arguments, main, open_stage
from libdsec import DSecContainerRunArgs

__all__ = ["Creator", "measure"]

HOW = "libdsec run_container, then exec true: with seccomp, cgroups, disk quota, a record of each command; stop not in the latency"
FLOOR_HOW = "floor.c: clone3 with the same namespaces (user and net too), idmapped layer, overlay, proc, tmpfs, exec true; no cgroup"


class Creator:
    """One sandbox made, asked and stopped, with the phases of the latency kept: where the time goes."""

    def __init__(self, stage: Stage, args: DSecContainerRunArgs) -> None:
        self._client, self._args = stage.client, args
        self.phases: dict[str, list[float]] = {}

    async def __call__(self) -> float:
        started = time.perf_counter()
        sandbox = await self._client.run_container(self._args)
        try:
            ready = time.perf_counter()
            result = await sandbox.exec(["true"])
            ended = time.perf_counter()
            if result.exit_code != 0:
                raise RuntimeError(f"true ended with exit code {result.exit_code}, signal {result.signal}")
            self._note(
                server=sandbox.created.create_ms or 0.0, create=(ready - started) * 1e3, exec=(ended - ready) * 1e3, process=result.wall_ms
            )
        finally:
            stopping = time.perf_counter()
            await sandbox.stop()
            self._note(stop=(time.perf_counter() - stopping) * 1e3)
        return ended - started

    def _note(self, **phases: float) -> None:
        for name, value in phases.items():
            self.phases.setdefault(name, []).append(value)

    def phases_json(self) -> dict[str, dict[str, float]]:
        """Percentiles in ms: create and exec as the client waits for them; the server's part of create, the process' life in exec; stop."""
        return {
            name: {"p50_ms": round(percentile(values, 0.5), 3), "p99_ms": round(percentile(values, 0.99), 3)}
            for name, values in self.phases.items()
        }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it in rounds."""
    async with open_stage(options.peers) as stage:
        at_once, serial = Creator(stage, stage.run_args()), Creator(stage, stage.run_args())
        await run_block(options.warm_up, options.concurrency, at_once)
        at_once.phases.clear()
        share = max(1, options.n // options.rounds)
        meter = CpuMeter(stage.daemon)
        alone = max(1, share // 4)
        things: dict[str, Callable[[], Awaitable[Block]]] = {
            "dsec": meter.around(lambda: run_block(share, options.concurrency, at_once)),
            "dsec_serial": lambda: run_block(alone, 1, serial),
        }
        if stage.floor is not None:
            things["floor"] = lambda: _floor(stage, share, options.concurrency)
            things["floor_serial"] = lambda: _floor(stage, alone, 1)
            things["floor_serial_without_netns"] = lambda: _floor(stage, alone, 1, net=False)
            things["floor_serial_without_netns_and_userns"] = lambda: _floor(stage, alone, 1, net=False, user=False)
        for name, peer in stage.peers.items():
            count = max(1, options.peer_n // options.rounds)
            things[name] = partial(run_block, count, options.concurrency, peer.create)
            things[f"{name}_serial"] = partial(run_block, max(1, count // 2), 1, peer.create)
        series = await run_rounds(options.rounds, things, options.surroundings)
        stage.daemon.sample_peaks()
        return _document(options, stage, series, at_once, serial, meter)


async def _floor(stage: Stage, count: int, workers: int, **kind: bool) -> Block:
    assert stage.floor is not None
    return await stage.floor.create(count, workers, **kind)


def _document(
    options: argparse.Namespace, stage: Stage, series: dict[str, Series], at_once: Creator, serial: Creator, meter: CpuMeter
) -> dict[str, Any]:
    done = {name: one.to_json() for name, one in series.items()}
    peers = {
        name: done[name] | {"serial": done[f"{name}_serial"], "how": peer.how.get("create", ""), "peak_rss_mb": peer.peak_rss_mb()}
        for name, peer in stage.peers.items()
    }
    floor = {"absent": stage.absent.get("floor", "")}
    if stage.floor is not None:
        variants = {name.removeprefix("floor_"): done[name] for name in done if name.startswith("floor_")}
        floor = done["floor"] | {"how": FLOOR_HOW} | variants
    dsec, alone = done["dsec"], done["dsec_serial"]
    return {
        "n": options.n,
        "concurrency": options.concurrency,
        "rounds": options.rounds,
        "warm_up": f"{options.warm_up} creations before the first round, not counted",
        "root": stage.root.to_json(),
        "dsec": dsec
        | {"how": HOW, "phases": at_once.phases_json(), "cpu_ms_each": meter.to_json(), "peak_rss_mb": stage.daemon.peak_rss_mb()},
        "dsec_serial": alone | {"phases": serial.phases_json()},
        "peers": stage.peer_documents(peers),
        "floor": floor,
        "budgets": {
            "create_p50_ms": at_most(alone.get("p50_ms"), 5, "ms"),
            "create_p99_ms": at_most(alone.get("p99_ms"), 15, "ms"),
            "failures": at_most(dsec["failures"] + alone["failures"], 0),
        },
    }


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("-n", type=int, default=1000, help="creations of ours at once, and of the floor; a quarter of it one at a time")
    parser.add_argument("-c", "--concurrency", type=int, default=16, help="creations under way at once")
    parser.add_argument("--peer-n", type=int, default=80, help="creations of each peer")
    parser.add_argument("--warm-up", type=int, default=50, help="creations before the first round")
    main("create", measure, parser.parse_args())
