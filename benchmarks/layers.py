"""The same workspace and toolkits on the same base, by three ways: `python -m benchmarks.layers --json`.

`layers`: EROFS layers below the sandbox's own. `untar`: archives that are unpacked in every sandbox (they come in a layer, so that nothing
is sent). `bind_mount`: folders of the node, unpacked there once, mounted read-only by bubblewrap: they hide what is below them, and there
is neither cgroup nor writable layer. In each the same job ends the time: libraries of the workspace and of a toolkit are imported, a
project's test file runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.budgets import at_least, at_most
from benchmarks.compose import compose
from benchmarks.corpus import TESTS, WHEELS
from benchmarks.downloads import SITE_PACKAGES, installed_wheel, source_release
from benchmarks.measure import Block, Series, run_block, run_rounds
from benchmarks.peers import PeerUnavailable
from benchmarks.peers.base import run_command, which
from benchmarks.root import CACHE
from benchmarks.stage import Stage, arguments, main, open_stage
from benchmarks.writes import HOW, Written, device_written_bytes, written
from dsec.environments import EnvironmentStore, build
from dsec.environments.manifest import Kind
from libdsec import DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError

__all__ = ["measure"]

MB = 1e6
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "workspace": ("numpy", "pandas"),
    "tools": ("botocore",),
    "services": ("google-api-python-client",),
}
QUICK_PARTS: Final[dict[str, tuple[str, ...]]] = {"workspace": ("numpy",), "tools": ("botocore",)}
PROJECT, VERSION, TEST = TESTS[0]
JOB = f"import sys, unittest; sys.path[:0] = ['src', '.']; import numpy, botocore; unittest.main(module=None, argv=['job', '-q', '{TEST}'])"


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to bring into a sandbox, at `place`: as a folder, an archive, and an environment of the store."""

    name: str
    place: str
    tree: Path
    tar: Path
    environment: str


def _made_parts(store: EnvironmentStore, wheels: dict[str, tuple[str, ...]]) -> list[Part]:
    parts = []
    for name, packages in wheels.items():
        folder = CACHE / "parts" / f"{name}-{'-'.join(packages)}"
        tree, tar, environment = folder / "tree", folder / "tree.tar", f"bench-part-{name}-{'-'.join(packages)}"
        if not tar.exists():
            shutil.rmtree(folder, ignore_errors=True)
            tree.mkdir(parents=True)
            for package in packages:
                installed = installed_wheel(package, WHEELS[package], CACHE, compiled=package in ("numpy", "pandas"))
                subprocess.run(["cp", "-a", f"{installed}/.", str(tree)], check=True)
            if name == "workspace":
                subprocess.run(["cp", "-a", str(source_release(PROJECT, VERSION, CACHE)), str(tree / "project")], check=True)
            subprocess.run(["tar", "-C", str(tree), "-cf", str(tar), "."], check=True)
        part = Part(name, f"/opt/{name}", tree, tar, environment)
        kind: Kind = "workspace" if name == "workspace" else "toolkit"
        _once(store, environment, partial(build, store, environment, source=f"dir:{tree}", kind=kind, dest=part.place))
        parts.append(part)
    return parts


def _archives(store: EnvironmentStore, parts: list[Part]) -> str:
    """A layer that holds the archives themselves."""
    name = "bench-archives-" + "-".join(part.environment.removeprefix("bench-part-") for part in parts)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        for part in parts:
            os.link(part.tar, Path(folder) / f"{part.name}.tar")
        _once(store, name, partial(build, store, name, source=f"dir:{folder}", kind="toolkit", dest="/archives"))
    return name


def _once(store: EnvironmentStore, name: str, make: Callable[[], object]) -> None:
    try:
        store.show(name)
    except DSecError:
        print(f"building {name}, once", file=sys.stderr, flush=True)
        make()


class Ways:
    """The three ways, one sandbox a call: made, filled, its job done. It lives until `stop`, so that what it wrote is written out."""

    def __init__(self, stage: Stage, parts: list[Part], archives: str, folder: Path) -> None:
        self._stage, self._parts, self._archives, self._folder = stage, parts, archives, folder
        self._living: list[Sandbox] = []
        self._path = ":".join(f"{part.place}/{SITE_PACKAGES}" for part in parts)
        self._argv = ["env", f"PYTHONPATH={self._path}", "python3", "-c", JOB]

    async def _ours(self, layers: list[str], before: str) -> float:
        args = DSecContainerRunArgs(environment=[self._stage.root.environment, *layers], memory_limit_mb=1024, cpu_cores_limit=1.0)
        started = time.perf_counter()
        sandbox = await self._stage.client.run_container(args, timeout=120)
        self._living.append(sandbox)
        if before:
            (await sandbox.run_shell(before, timeout=600)).check()
        (await sandbox.exec(self._argv, cwd="/opt/workspace/project", timeout=120)).check()
        return time.perf_counter() - started

    async def stop(self) -> None:
        """Every sandbox that there is."""
        living, self._living = self._living, []
        for sandbox in living:
            await sandbox.stop()

    async def layers(self) -> float:
        return await self._ours([part.environment for part in self._parts], "")

    async def untar(self) -> float:
        unpack = [f"mkdir -p {part.place} && tar -C {part.place} -xf /archives/{part.name}.tar" for part in self._parts]
        return await self._ours([self._archives], " && ".join(unpack))

    def unpack_once(self) -> float:
        """What the node does before it can mount folders; seconds."""
        started = time.perf_counter()
        for part in self._parts:
            (self._folder / part.name).mkdir()
            subprocess.run(["tar", "-C", str(self._folder / part.name), "-xf", str(part.tar)], check=True)
        return time.perf_counter() - started

    async def bind_mount(self) -> float:
        argv = [
            which("bwrap"),
            "--ro-bind",
            str(self._stage.root.tree),
            "/",
            "--unshare-all",
            "--uid",
            "0",
            "--gid",
            "0",
            "--tmpfs",
            "/opt",
        ]
        for part in self._parts:
            argv += ["--ro-bind", str(self._folder / part.name), part.place]
        argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--die-with-parent", "--chdir", "/opt/workspace/project", "--"]
        return await run_command([*argv, *self._argv])


class WriteMeter:
    """Bytes that blocks of one way wrote, by the same readings for all of them."""

    def __init__(self, stage: Stage, ways: Ways) -> None:
        self._stage, self._ways = stage, ways
        self.written, self.device, self.sandboxes = Written(), 0, 0

    def around(self, measure: Callable[[], Awaitable[Block]]) -> Callable[[], Awaitable[Block]]:
        """The same measurement, metered; with all written out before and after, while the sandboxes live."""

        async def metered() -> Block:
            await asyncio.to_thread(os.sync)
            before, device = self._read()
            block = await measure()
            await asyncio.to_thread(os.sync)
            after, now = self._read()
            self.written = self.written.plus(after.since(before))
            self.device += now - device
            self.sandboxes += len(block.samples_ms)
            await self._ways.stop()
            return block

        return metered

    def _read(self) -> tuple[Written, int]:
        daemon = self._stage.daemon
        return written(daemon.pids(), daemon.state), device_written_bytes(self._stage.folder)

    def to_json(self, *, ours: bool) -> dict[str, float]:
        each = max(1, self.sandboxes)
        size = self.written.most if ours else self.written.least
        return {"written_mb": round(size / each / MB, 3), "device_written_mb": round(self.device / each / MB, 2)}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The three ways in turn, `--rounds` times."""
    async with open_stage("") as stage:
        store = EnvironmentStore(stage.folder / "state", stage.folder / "run", stage.root.store)
        parts = await asyncio.to_thread(_made_parts, store, QUICK_PARTS if options.quick else PARTS)
        archives = await asyncio.to_thread(_archives, store, parts)
        folder = stage.folder / "bound"
        folder.mkdir()
        ways = Ways(stage, parts, archives, folder)
        share = max(1, options.n // options.rounds)
        operations: dict[str, Callable[[], Awaitable[float]]] = {"layers": ways.layers, "untar": ways.untar}
        absent, once = "", 0.0
        try:
            which("bwrap")
            once = await asyncio.to_thread(ways.unpack_once)
            operations["bind_mount"] = ways.bind_mount
        except PeerUnavailable as error:
            absent = str(error)
        meters = {name: WriteMeter(stage, ways) for name in operations}
        things = {name: meters[name].around(partial(run_block, share, options.concurrency, one)) for name, one in operations.items()}
        series = await run_rounds(options.rounds, things, options.surroundings)
        three = [stage.root.environment, *(part.environment for part in parts[:2])]
        size = sum(file.stat().st_size for file in (stage.root.tar, *(part.tar for part in parts[:2])))
        await options.surroundings.look()
        composed = await asyncio.to_thread(compose, stage.folder, stage.root.store, three, size, 2 * options.rounds + 1)
        return _document(options, stage, parts, series, meters, once, absent, composed)


def _document(
    options: argparse.Namespace,
    stage: Stage,
    parts: list[Part],
    series: dict[str, Series],
    meters: dict[str, WriteMeter],
    once: float,
    absent: str,
    composed: dict[str, Any],
) -> dict[str, Any]:
    done = {
        name: one.to_json() | {"wall_s": round(sum(block.wall_s for block in one.blocks), 2)} | meters[name].to_json(ours=name == "layers")
        for name, one in series.items()
    }
    size = sum(part.tar.stat().st_size for part in parts)
    bound: dict[str, Any] = {"absent": absent}
    if "bind_mount" in done:
        bound = done["bind_mount"] | {"unpacked_once_s": round(once, 2), "unpacked_once_mb": round(size / MB, 1)}
        bound["how"] = "bwrap with a read-only bind of each folder, base below; no cgroup, no writable layer, no daemon"
    layers, untar = done["layers"], done["untar"]
    return {
        "n": options.n,
        "concurrency": options.concurrency,
        "rounds": options.rounds,
        "root": stage.root.to_json(),
        "parts_mb": {part.name: round(part.tar.stat().st_size / MB, 1) for part in parts},
        "written_how": f"for each sandbox: {HOW}",
        "dsec": {"layers": layers, "compose": composed, "how": "libdsec run_container of base, workspace, toolkits; then the job"},
        "peers": {
            "untar": untar | {"how": "the same sandboxes of the base alone; tar -x of each archive inside; then the job"},
            "bind_mount": bound,
        },
        "published": {"times_faster": 1.76, "times_fewer_writes": 5.5, "by": "DSec, EROFS layers against untar, a whole rollout"},
        "budgets": {
            "times_faster_than_untar": at_least(_times(untar["wall_s"], layers["wall_s"]), 1.76),
            "times_fewer_writes_than_untar": at_least(_times(untar["written_mb"], layers["written_mb"]), 5.5),
            "compose_never_seen_p50_ms": at_most(composed["never_seen"].get("p50_ms"), 30, "ms"),
            "compose_again_p50_ms": at_most(composed["again"].get("p50_ms"), 1, "ms"),
            "compose_fetched_percent": at_most(round(composed["fetched_share"] * 100, 2), 2, "%"),
        },
    }


def _times(peer: float, ours: float) -> float | None:
    return round(peer / ours, 2) if peer and ours else None


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.set_defaults(peers="", rounds=3)
    parser.add_argument("-n", type=int, default=48, help="sandboxes of each way")
    parser.add_argument("-c", "--concurrency", type=int, default=8, help="sandboxes under way at once")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args()
    if options.quick:
        options.n, options.rounds, options.concurrency = 4, 1, 2
    main("layers", measure, options)
