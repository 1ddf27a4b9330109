"""Compiles and runs floor.c: what the kernel alone charges."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.host import memory_folder
from benchmarks.measure import Block
from benchmarks.peers import PeerUnavailable

__all__ = ["Floor"]

SOURCE = Path(__file__).with_name("floor.c")


class Floor:
    """The compiled floor on one root."""

    def __init__(self, tree: Path, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise PeerUnavailable("cc is not installed")
        self._tree, self._folder = tree, folder
        self._program = folder / "floor"
        built = subprocess.run(
            [compiler, "-O2", "-o", str(self._program), str(SOURCE)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if built.returncode != 0:
            raise PeerUnavailable(f"cc: {built.stderr[-300:]}")

    async def _run(self, mode: str, *options: str) -> Block:
        with tempfile.TemporaryDirectory(prefix="dsec-bench-floor-", dir=memory_folder(self._folder)) as scratch:
            argv = [str(self._program), *options, mode, str(self._tree), scratch]
            done = await asyncio.to_thread(
                subprocess.run, argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300
            )
        block = Block(first_error=done.stderr.strip()[-300:])
        for line in done.stdout.splitlines():
            word, _, rest = line.partition(" ")
            if word == "wall":
                block.wall_s = float(rest) / 1e6
            elif word == "failures":
                block.failures = int(rest)
            else:
                block.samples_ms.append(float(word) / 1e3)
        if done.returncode != 0:
            block.failures += 1
        return block

    async def create(self, count: int, workers: int, *, net: bool = True, user: bool = True) -> Block:
        """Namespaces, overlay on the layer, proc, tmpfs, exec of `true`, and its end. Without `net` or `user`: without that namespace."""
        options = ["-n", str(count), "-c", str(workers)]
        options += ([] if net else ["--no-net"]) + ([] if user else ["--no-user"])
        return await self._run("create", *options)

    async def exec(self, count: int) -> Block:
        """fork, setns by pidfd, fork, exec of `true` in one living sandbox."""
        return await self._run("exec", "-n", str(count))
