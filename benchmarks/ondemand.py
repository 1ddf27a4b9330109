"""A burst on a node that has seen nothing: `python -m benchmarks.ondemand --json`.

`--sandboxes` sandboxes are asked for at once, over `--images` environments, on a store that gives `--mb-per-s` and takes `--request-ms`
for each request. Each imports a library and runs a test file of a real project. `cold` is the first burst of a daemon with an empty state
folder on a store that nothing has been read from; `warm` is the same burst again; `cold_with_traces` is a cold one on another node, which
finds in the store what the first one has read. The peer `eager` pulls and unpacks each image before its first sandbox. The time is from the
first request to the last result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.budgets import at_least, at_most
from benchmarks.corpus import Corpus, Image, made_corpus
from benchmarks.daemon import Daemon
from benchmarks.eager import EagerNode
from benchmarks.host import memory_folder
from benchmarks.imported import imported_store
from benchmarks.measure import Block, Series
from benchmarks.peers import PeerUnavailable
from benchmarks.peers.base import run_command
from benchmarks.slowstore import SlowStore, StoreTraffic, compile_slow_store
from benchmarks.stage import arguments, main
from benchmarks.writes import HOW, Written, device_written_bytes, written
from libdsec import DSecClient, DSecContainerRunArgs

__all__ = ["measure"]

MB = 1e6
ROOM_LEFT = 4 << 30


@dataclass(slots=True)
class Burst:
    """What one burst took, read and wrote."""

    block: Block = field(default_factory=Block)
    traffic: StoreTraffic | None = None
    written: Written = field(default_factory=Written)
    device_written: int = 0
    share: float = 1.0
    """Of all images and sandboxes; below 1 what it took is scaled to all of them wherever it is compared."""

    @property
    def whole_s(self) -> float:
        """Seconds to the last result, of all sandboxes."""
        return self.block.wall_s / self.share

    def to_json(self, all_bytes: int, *, ours: bool) -> dict[str, Any]:
        """`image_share_read` is of the bytes that all images have together, unpacked."""
        document = Series([self.block]).to_json()
        for name in ("p50_ms_by_round", "p50_ms_best_round", "per_s"):
            document.pop(name, None)
        document |= {
            "wall_s": round(self.block.wall_s, 2),
            "written_mb": round((self.written.most if ours else self.written.least) / MB, 2),
        }
        document["device_written_mb"] = round(self.device_written / MB, 1)
        if self.share < 1:
            document["scaled"] = (
                f"measured with {self.share:.0%} of images and sandboxes; {self.whole_s:.1f} s stands for all in the budgets"
            )
        if self.traffic is not None:
            document |= {"store": self.traffic.to_json(), "image_share_read": round(self.traffic.bytes_read / all_bytes, 4)}
        return document


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Cold and warm on one daemon, then the peer on a mount of its own."""
    if os.geteuid() != 0:
        raise SystemExit("benchmarks make namespaces, mounts and cgroups: run them as root")
    corpus = await asyncio.to_thread(made_corpus, options.images, quick=options.quick, compression=options.compression)
    store = await asyncio.to_thread(imported_store, corpus)
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as work:
        folder = Path(work)
        program = compile_slow_store(folder)

        def far(source: Path, name: str) -> contextlib.AbstractContextManager[SlowStore]:
            return SlowStore.mounted(program, source, folder / name, mb_per_s=options.mb_per_s, request_ms=options.request_ms)

        _forget_traces(store)
        with far(store, "first") as slow:
            await options.surroundings.look()
            cold, *warm = await _ours(options, corpus, slow, folder / "node", 1 + options.rounds, record=True)
        with far(store, "second") as slow:
            await options.surroundings.look()
            traced = (await _ours(options, corpus, slow, folder / "other-node", 1))[0]
        _forget_traces(store)
        eager: Burst | str = "not asked for"
        if "eager" in options.peers.split(","):
            with far(corpus.layout, "peer") as slow:
                await options.surroundings.look()
                eager = await _eager(options, corpus, slow, folder)
    return _document(options, corpus, cold, warm, traced, eager)


def _forget_traces(store: Path) -> None:
    for file in (store / "traces").glob("*.json"):
        file.unlink()


async def _record_traces(corpus: Corpus, daemon: Daemon) -> None:
    """What the node has read, for others to read ahead."""
    folders = ["--state", str(daemon.state), "--run", str(daemon.run), "--store", str(daemon.store)]
    for image in corpus.images:
        argv = [sys.executable, "-c", "from dsec.cli import main; main()", "env", "trace", image.name, "--record", *folders]
        await run_command(argv)


async def _ours(
    options: argparse.Namespace, corpus: Corpus, slow: SlowStore, folder: Path, bursts: int, *, record: bool = False
) -> list[Burst]:
    """One burst after another on a node that begins with nothing. `record`: then its traces are kept in the store."""
    folder.mkdir()
    run = Path(tempfile.mkdtemp(prefix="dsec-bench-", dir=memory_folder(Path("/run"))))
    daemon = Daemon(folder, run, slow.target)
    try:
        await daemon.start()
        async with DSecClient(daemon.url) as client:

            async def job(image: Image, done: Callable[[], None]) -> None:
                args = DSecContainerRunArgs(container_image=image.name, memory_limit_mb=1024, cpu_cores_limit=1.0)
                async with await client.run_container(args, timeout=600) as sandbox:
                    result = await sandbox.exec(image.job.argv, cwd=image.job.cwd, timeout=600)
                    if result.exit_code != 0:
                        raise RuntimeError(f"the job of {image.name} ended with {result.exit_code}: {result.stderr[-300:]!r}")
                    done()

            def writes() -> Written:
                return written(daemon.pids(), daemon.state)

            done = []
            for number in range(bursts):
                done.append(await _burst(options, corpus, job, slow, writes, folder))
                _tell(f"{folder.name}, burst {number + 1} of {bursts}", done[-1])
        if record:
            await _record_traces(corpus, daemon)
        return done
    finally:
        await daemon.stop()
        shutil.rmtree(run, ignore_errors=True)


async def _eager(options: argparse.Namespace, corpus: Corpus, slow: SlowStore, folder: Path) -> Burst | str:
    part = msgspec.structs.replace(corpus, images=corpus.images[: options.eager_images or None])
    needed = sum(layer.tar_bytes for layer in part.layers())
    free = shutil.disk_usage(folder).free
    if free < needed + ROOM_LEFT:
        return f"it needs {needed / 1e9:.0f} GB on the disk, {free / 1e9:.0f} GB are free; --eager-images N measures it on fewer"
    try:
        async with EagerNode.opened(part, slow.target, folder / "eager") as node:

            async def job(image: Image, done: Callable[[], None]) -> None:
                await node.run(image)
                done()

            burst = await _burst(options, part, job, slow, lambda: written([os.getpid()]), folder, len(part.images) / len(corpus.images))
            _tell("eager", burst)
            return burst
    except PeerUnavailable as error:
        return str(error)


async def _burst(
    options: argparse.Namespace,
    corpus: Corpus,
    job: Callable[[Image, Callable[[], None]], Awaitable[None]],
    slow: SlowStore,
    writes: Callable[[], Written],
    folder: Path,
    share: float = 1.0,
) -> Burst:
    """All sandboxes asked for at once. What comes after a job's result, as the sandbox's end, is not in its time."""
    burst = Burst(share=share)
    count = max(1, round(options.sandboxes * share))
    gate = asyncio.Semaphore(options.concurrency)
    await asyncio.to_thread(os.sync)
    before, wrote, device = slow.traffic(), writes(), device_written_bytes(folder)
    started = time.perf_counter()

    def done() -> None:
        burst.block.samples_ms.append((time.perf_counter() - started) * 1e3)
        burst.block.wall_s = time.perf_counter() - started

    async def one(number: int) -> None:
        async with gate:
            try:
                await job(corpus.images[number % len(corpus.images)], done)
            except Exception as error:
                burst.block.failures += 1
                burst.block.first_error = burst.block.first_error or f"{type(error).__name__}: {error}"[:500]

    async with _ticking(burst, count):
        await asyncio.gather(*(one(number) for number in range(count)))
    burst.traffic = slow.traffic().since(before)
    await asyncio.to_thread(os.sync)
    burst.written, burst.device_written = writes().since(wrote), device_written_bytes(folder) - device
    return burst


@contextlib.asynccontextmanager
async def _ticking(burst: Burst, count: int) -> AsyncIterator[None]:
    """Tell now and then how far the burst is."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(5)
            print(f"  {len(burst.block.samples_ms)} of {count} results, {burst.block.failures} failed", file=sys.stderr, flush=True)

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _tell(name: str, burst: Burst) -> None:
    assert burst.traffic is not None
    print(
        f"{name}: {len(burst.block.samples_ms)} results in {burst.block.wall_s:.1f} s, {burst.block.failures} failed, "
        f"{burst.traffic.bytes_read / MB:.0f} MB in {burst.traffic.requests} requests from the store"
        f", {burst.written.most / MB:.1f} MB written" + (f"; {burst.block.first_error}" if burst.block.first_error else ""),
        file=sys.stderr,
        flush=True,
    )


def _ratio(above: float, below: float) -> float | None:
    return round(above / below, 3) if above and below else None


def _document(
    options: argparse.Namespace, corpus: Corpus, cold: Burst, warm: list[Burst], traced: Burst, eager: Burst | str
) -> dict[str, Any]:
    everything = sum(image.tar_bytes for image in corpus.images)
    best = min(warm, key=lambda burst: burst.block.wall_s)
    faster = fewer = None
    if isinstance(eager, Burst):
        faster = _ratio(eager.whole_s, cold.whole_s)
        fewer = round((1 - cold.written.most * eager.share / eager.written.least) * 100, 2) if eager.written.least else None
    failures = sum(burst.block.failures for burst in (cold, traced, *warm))
    return {
        "n": options.sandboxes,
        "concurrency": options.concurrency,
        "store_limits": {"mb_per_s": options.mb_per_s, "request_ms": options.request_ms},
        "corpus": corpus.to_json(),
        "never_seen": "an empty state folder, and a new mount of the store: the page cache holds nothing of it; other caches stay",
        "written_how": HOW,
        "dsec": {
            "cold": cold.to_json(everything, ours=True),
            "warm": best.to_json(everything, ours=True),
            "cold_with_traces": traced.to_json(everything, ours=True),
            "how": "libdsec run_container, exec of the job, stop",
        }
        | {"warm_wall_s_by_round": [round(burst.block.wall_s, 2) for burst in warm]},
        "peers": {
            "eager": {"absent": eager}
            if isinstance(eager, str)
            else eager.to_json(round(everything * eager.share), ours=False)
            | {"how": "each layer read, decompressed and untarred once, three at a time; then bwrap on an overlay of them, no cgroup"}
        },
        "budgets": {
            "times_faster_than_eager": at_least(faster, 5),
            "percent_fewer_local_writes": at_least(fewer, 90, "%"),
            "cold_against_warm": at_most(_ratio(cold.block.wall_s, best.block.wall_s), 1.3),
            "failures": at_most(failures, 0),
        },
    }


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.set_defaults(peers="eager", rounds=2)
    parser.add_argument("--sandboxes", type=int, default=200, help="asked for at once")
    parser.add_argument("--images", type=int, default=20, help="environments that they are spread over")
    parser.add_argument("--eager-images", type=int, default=0, help="environments that the peer has, with their share of sandboxes; 0: all")
    parser.add_argument("--concurrency", type=int, default=200, help="sandboxes that the client has under way at once, ours and the peer's")
    parser.add_argument("--compression", choices=["zstd", "gzip", "none"], default="zstd", help="of the layers that the peer pulls")
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="what the store gives all its readers together")
    parser.add_argument("--request-ms", type=float, default=2.0, help="what each request to it takes, at least")
    parser.add_argument("--quick", action="store_true", help="small images")
    main("ondemand", measure, parser.parse_args())
