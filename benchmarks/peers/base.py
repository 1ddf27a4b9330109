"""What a peer can be asked for. Whatever it lacks raises `PeerUnavailable`, which the report then prints as the reason."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path
from typing import ClassVar

__all__ = ["Peer", "PeerUnavailable", "drain_command", "run_command", "which"]


class PeerUnavailable(Exception):
    """The peer is not installed, does not start here, or has no such operation."""


def which(program: str) -> str:
    """Path of an installed program."""
    path = shutil.which(program)
    if path is None:
        raise PeerUnavailable(f"{program} is not installed")
    return path


async def run_command(argv: list[str], *, stdout: int | None = None, timeout: float = 120) -> float:
    """Run to its end; seconds it took. A nonzero exit raises RuntimeError with what it said.

    In a thread with vfork, which costs a peer less than asyncio's own way of starting a process.
    """

    def run() -> float:
        started = time.perf_counter()
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=subprocess.PIPE,
            timeout=timeout,
            check=False,
        )
        took = time.perf_counter() - started
        if done.returncode != 0:
            raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}")
        return took

    return await asyncio.to_thread(run)


async def drain_command(argv: list[str], size: int, timeout: float = 300) -> float:
    """Run, read `size` bytes of its output and its end; seconds it took."""

    def run() -> float:
        started = time.perf_counter()
        buffer = memoryview(bytearray(1 << 20))
        got = 0
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as process:
            assert process.stdout is not None
            while count := process.stdout.readinto(buffer):  # type: ignore[attr-defined]
                got += count
            code = process.wait(timeout)
        if code != 0 or got != size:
            raise RuntimeError(f"{argv[0]} ended with {code} after {got} of {size} bytes")
        return time.perf_counter() - started

    return await asyncio.to_thread(run)


class Peer:
    """One peer, opened on a root. Times are in seconds; `how` says in words what each number is of."""

    name: ClassVar[str]
    how: ClassVar[dict[str, str]] = {}
    no_streams: ClassVar[str] = "has neither exec nor file transfer"

    async def open(self, tree: Path, tar: Path, folder: Path) -> None:
        """Ready to create from `tree` (mounted root) or `tar` (the same as an archive); everything made goes below `folder`."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Nothing of it is left."""

    async def create(self) -> float:
        """From asked to first command answered. Removed again before the return, outside the time."""
        raise PeerUnavailable(f"{self.name} cannot create")

    async def start(self) -> str:
        """A sandbox that stays."""
        raise PeerUnavailable(f"{self.name} has no sandbox that stays: each command is a new one")

    async def remove(self, sandbox: str) -> None:
        """End a sandbox that `start` gave."""

    async def exec_true(self, sandbox: str) -> float:
        raise PeerUnavailable(f"{self.name} has no exec")

    async def stdout(self, sandbox: str, argv: list[str], size: int) -> float:
        """Run `argv` inside and read the `size` bytes that it writes."""
        raise PeerUnavailable(f"{self.name} has no exec")

    async def copy_in(self, sandbox: str, local: Path, remote: str) -> float:
        raise PeerUnavailable(f"{self.name} has no file transfer")

    async def copy_out(self, sandbox: str, remote: str, local: Path) -> float:
        raise PeerUnavailable(f"{self.name} has no file transfer")

    async def commit(self, sandbox: str, image: str) -> float:
        """Keep the sandbox's files as `image`."""
        raise PeerUnavailable(f"{self.name} keeps no sandbox's files")

    async def start_from(self, image: str) -> str:
        """A sandbox that stays, of an image that `commit` made."""
        raise PeerUnavailable(f"{self.name} keeps no sandbox's files")

    async def run(self, sandbox: str, argv: list[str]) -> float:
        """A command in a living sandbox; RuntimeError unless it ends with 0."""
        raise PeerUnavailable(f"{self.name} has no exec")

    def peak_rss_mb(self) -> dict[str, float]:
        """By process name, of the peer's own long-lived processes."""
        return {}
