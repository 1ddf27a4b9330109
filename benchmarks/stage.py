"""What every benchmark stands on: private folders, the shared root, a daemon with its client, the peers that could be opened, the floor."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.daemon import Daemon
from benchmarks.floor import Floor
from benchmarks.host import describe_run, memory_folder
from benchmarks.peers import PEERS, Peer, PeerUnavailable
from benchmarks.report import print_document
from benchmarks.root import Root, shared_root
from benchmarks.surroundings import Surroundings
from libdsec import DSecClient, DSecContainerRunArgs

__all__ = ["Stage", "arguments", "main", "open_stage"]


@dataclass(slots=True)
class Stage:
    """All that is open. `absent` holds the reason for each peer, and for the floor, that is not."""

    folder: Path
    root: Root
    daemon: Daemon
    client: DSecClient
    peers: dict[str, Peer] = field(default_factory=dict)
    floor: Floor | None = None
    absent: dict[str, str] = field(default_factory=dict)

    def run_args(self, **changes: Any) -> DSecContainerRunArgs:
        """A small sandbox of the shared root."""
        return DSecContainerRunArgs(container_image=self.root.environment, **({"memory_limit_mb": 512, "cpu_cores_limit": 1.0} | changes))

    def peer_documents(self, measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Of every known peer what was measured, or why it was not."""
        return {name: measured.get(name) or {"absent": self.absent.get(name, "not asked for")} for name in PEERS}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--peers", default=",".join(PEERS), help="which peers to measure, comma-separated; empty for none")
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait, at most, before a round while others use the CPUs")
    parser.add_argument("--rounds", type=int, default=5, help="how many times everything is measured in turn")
    return parser


@contextlib.asynccontextmanager
async def open_stage(peers: str = "", *, profiled: bool = False) -> AsyncIterator[Stage]:
    """Everything opened, and everything ended and removed at the end, also after a failure or Ctrl-C."""
    if os.geteuid() != 0:
        raise SystemExit("benchmarks make namespaces, mounts and cgroups: run them as root")
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dsec-bench-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        run = Path(tempfile.mkdtemp(prefix="dsec-bench-", dir=memory_folder(Path("/run"))))
        stack.callback(shutil.rmtree, run, ignore_errors=True)
        root = stack.enter_context(shared_root(folder))
        daemon = Daemon(folder, run, root.store, profiled=profiled)
        stack.push_async_callback(daemon.stop)
        await daemon.start()
        client = await stack.enter_async_context(DSecClient(daemon.url))
        stage = Stage(folder, root, daemon, client)
        try:
            stage.floor = Floor(root.tree, folder)
        except PeerUnavailable as error:
            stage.absent["floor"] = str(error)
        for name in filter(None, peers.split(",")):
            await _open_peer(stage, stack, name)
        yield stage


async def _open_peer(stage: Stage, stack: contextlib.AsyncExitStack, name: str) -> None:
    if name not in PEERS:
        raise SystemExit(f"no peer named {name!r}: {', '.join(PEERS)}")
    peer = PEERS[name]()
    print(f"opening {name}", file=sys.stderr, flush=True)
    try:
        await peer.open(stage.root.tree, stage.root.tar, stage.folder)
    except Exception as error:
        stage.absent[name] = f"{type(error).__name__}: {error}"[:500] if not isinstance(error, PeerUnavailable) else str(error)
        print(f"{name} is absent: {stage.absent[name]}", file=sys.stderr)
        return
    stack.push_async_callback(peer.aclose)
    stage.peers[name] = peer


def main(benchmark: str, measure: Callable[[argparse.Namespace], Awaitable[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Run, put the head of facts before what was measured, print. stdout gets the result alone."""
    head = describe_run(benchmark)
    surroundings = options.surroundings = Surroundings(options.wait_quiet)

    async def run() -> dict[str, Any]:
        return await measure(options)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = head | runner.run(run()) | {"surroundings": surroundings.to_json()}
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print_document(document)
