"""bubblewrap: a sandbox is a command. No daemon, no writable layer, no living sandbox: the least that anybody offers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from benchmarks.peers.base import Peer, run_command, which

__all__ = ["Bubblewrap"]


class Bubblewrap(Peer):
    """`bwrap --ro-bind TREE / --unshare-all`."""

    name: ClassVar[str] = "bubblewrap"
    how: ClassVar[dict[str, str]] = {
        "create": "bwrap --ro-bind ROOT / --unshare-all --proc --dev --tmpfs /tmp true: read-only, no cgroup, no exec later"
    }

    async def open(self, tree: Path, tar: Path, folder: Path) -> None:
        self._argv = [which("bwrap"), "--ro-bind", str(tree), "/", "--unshare-all", "--uid", "0", "--gid", "0"]
        self._argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--die-with-parent", "true"]
        await self.create()

    async def create(self) -> float:
        return await run_command(self._argv)
