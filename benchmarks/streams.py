"""Bulk data through a sandbox: `python -m benchmarks.streams --json`.

A command's stdout to the client, a file in, a file out, `--size-mb` each, one after another, in rounds with the peers; and the most memory
that each process of ours ever had. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.budgets import at_least, at_most
from benchmarks.host import memory_folder
from benchmarks.measure import Block, Series, run_block, run_rounds
from benchmarks.peers.base import drain_command
from benchmarks.stage import Stage, arguments, main, open_stage
from libdsec import Sandbox

__all__ = ["measure", "writer"]

DIRECTIONS = ("stdout", "file_in", "file_out")
REMOTE = "/root/payload"
MB = 1e6
GROWTH_BUDGET_MB = 32


def writer(size: int, *, source: str = "/dev/zero", target: Path | None = None) -> list[str]:
    """The command that writes `size` bytes to stdout, or to `target`: the same for ours, the peers and the floor."""
    argv = ["dd", f"if={source}", "bs=1M", "status=none", "iflag=count_bytes", f"count={size}"]
    return argv if target is None else [*argv, f"of={target}"]


@contextlib.contextmanager
def _client_folder(stage: Stage, size: int) -> Iterator[Path]:
    """Where the client's side of the files is: in memory where there is room, so that its disk is not what is measured."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir=memory_folder(stage.folder, 4 * size)) as folder:
        yield Path(folder)


async def _settled(folder: Path, operation: Callable[[], Awaitable[float]]) -> Block:
    """One operation, begun when what the ones before it wrote is on the disk."""
    await asyncio.to_thread(subprocess.run, ["sync", "-f", str(folder)], check=True)
    return await run_block(1, 1, operation)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Each direction in turn, for ours, the floor and each peer, `--rounds` times."""
    size = options.size_mb << 20
    async with open_stage(options.peers) as stage:
        with _client_folder(stage, size) as files:
            payload = files / "payload"
            subprocess.run(writer(size, source="/dev/urandom", target=payload), check=True)
            sandbox = await stage.client.run_container(stage.run_args(memory_limit_mb=4096, cpu_cores_limit=2.0))
            await _stdout(sandbox, min(size, 16 << 20))
            stage.daemon.sample_peaks()
            before, client_before = stage.daemon.peak_rss_mb(), _own_peak_mb()
            inside = stage.folder / "floor-file"
            operations: dict[str, Callable[[], Awaitable[float]]] = {
                "dsec stdout": partial(_stdout, sandbox, size),
                "dsec file_in": partial(_file_in, sandbox, payload),
                "dsec file_out": partial(_file_out, sandbox, files / "out", size),
                "floor stdout": partial(drain_command, writer(size), size),
                "floor file_in": partial(asyncio.to_thread, _copy, payload, inside),
                "floor file_out": partial(asyncio.to_thread, _copy, inside, files / "out"),
            }
            operations |= await _peer_operations(stage, files, size)
            things = {name: partial(_settled, stage.folder, operation) for name, operation in operations.items()}
            async with _peaks_sampled(stage):
                series = await run_rounds(options.rounds, things, options.surroundings)
            stage.daemon.sample_peaks()
            await sandbox.stop()
        peaks = {name: peer.peak_rss_mb() for name, peer in stage.peers.items()}
        return _document(options, stage, series, before, client_before, peaks)


async def _stdout(sandbox: Sandbox, size: int) -> float:
    started = time.perf_counter()
    process = await sandbox.start(writer(size))
    got = 0
    async for _stream, data in process.output():
        got += len(data)
    result = await process.wait()
    took = time.perf_counter() - started
    if result.exit_code != 0 or got != size:
        raise RuntimeError(f"exit code {result.exit_code}, {got} of {size} bytes arrived, {result.stdout_bytes} were written")
    return took


async def _file_in(sandbox: Sandbox, payload: Path) -> float:
    started = time.perf_counter()
    await sandbox.files.upload(payload, REMOTE)
    return time.perf_counter() - started


async def _file_out(sandbox: Sandbox, target: Path, size: int) -> float:
    started = time.perf_counter()
    await sandbox.files.download(REMOTE, target)
    took = time.perf_counter() - started
    got = target.stat().st_size
    target.unlink()
    if got != size:
        raise RuntimeError(f"{got} of {size} bytes arrived")
    return took


def _copy(source: Path, target: Path) -> float:
    """Through a buffer, as data that crosses a process must go; the old target is gone before, outside the time."""
    target.unlink(missing_ok=True)
    buffer = memoryview(bytearray(1 << 20))
    started = time.perf_counter()
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as to:
        while count := reader.readinto(buffer):
            to.write(buffer[:count])
    return time.perf_counter() - started


async def _peer_operations(stage: Stage, files: Path, size: int) -> dict[str, Callable[[], Awaitable[float]]]:
    operations: dict[str, Callable[[], Awaitable[float]]] = {}
    for name, peer in stage.peers.items():
        if "streams" not in peer.how:
            stage.absent[name] = peer.no_streams
            continue
        living = await peer.start()
        target = files / f"out-{name}"
        operations[f"{name} stdout"] = partial(peer.stdout, living, writer(size), size)
        operations[f"{name} file_in"] = partial(peer.copy_in, living, files / "payload", REMOTE)
        operations[f"{name} file_out"] = partial(_peer_out, partial(peer.copy_out, living, REMOTE, target), target)
    return operations


async def _peer_out(copy: Callable[[], Awaitable[float]], target: Path) -> float:
    try:
        return await copy()
    finally:
        target.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def _peaks_sampled(stage: Stage, every_s: float = 0.2) -> AsyncIterator[None]:
    """A chronus lives no longer than its session: its peak must be read while it does."""

    async def sample() -> None:
        while True:
            stage.daemon.sample_peaks()
            await asyncio.sleep(every_s)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _own_peak_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _rate(series: Series, size: int) -> dict[str, Any]:
    document = series.to_json()
    for name in ("p90_ms", "p50_ms_by_round", "p50_ms_best_round", "per_s"):
        document.pop(name, None)
    took = [sample for block in series.blocks for sample in block.samples_ms]
    if took:
        document["mb_per_s"] = round(size / MB / (statistics.median(took) / 1e3), 1)
        document["mb_per_s_by_round"] = [round(size / MB / (one / 1e3), 1) for one in took]
    return document


def _document(
    options: argparse.Namespace,
    stage: Stage,
    series: dict[str, Series],
    before: dict[str, float],
    client_before: float,
    peaks: dict[str, dict[str, float]],
) -> dict[str, Any]:
    size = options.size_mb << 20
    done: dict[str, dict[str, Any]] = {}
    for name, one in series.items():
        who, _, direction = name.partition(" ")
        done.setdefault(who, {})[direction] = _rate(one, size)
    after = stage.daemon.peak_rss_mb()
    growth = {name: round(peak - before.get(name, 0.0), 2) for name, peak in after.items() if name in before}
    dsec, floor = done.pop("dsec"), done.pop("floor")
    for name, peer in stage.peers.items():
        if name in done:
            done[name] |= {"peak_rss_mb": peaks[name], "how": peer.how["streams"]}
    rates = {direction: dsec[direction].get("mb_per_s") for direction in DIRECTIONS}
    return {
        "n": options.rounds,
        "size_bytes": size,
        "rounds": options.rounds,
        "warm_up": "16 MiB of stdout, not counted",
        "root": stage.root.to_json(),
        "dsec": dsec
        | {
            "how": f"libdsec start({' '.join(writer(size))}).output(), files.upload, files.download",
            "peak_rss_mb": after,
            "peak_rss_mb_before": before,
            "client_peak_rss_mb": _own_peak_mb(),
            "client_peak_rss_mb_before": client_before,
        },
        "peers": stage.peer_documents(done),
        "floor": floor | {"how": "the same command on the host, its pipe read; a copy through a 1 MiB buffer to and from the state's disk"},
        "budgets": {f"{direction}_mb_per_s": at_least(rates[direction], 400, "MB/s") for direction in DIRECTIONS}
        | {
            "daemon_peak_growth_mb": at_most(max(growth.values(), default=None), GROWTH_BUDGET_MB, "MB"),
            "failures": at_most(sum(dsec[direction]["failures"] for direction in DIRECTIONS), 0),
        },
    }


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--size-mb", type=int, default=1024, help="MiB in each direction")
    main("streams", measure, parser.parse_args())
