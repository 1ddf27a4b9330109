"""podman with crun: no daemon, one monitor process a container, its storage in a private folder."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
from pathlib import Path
from typing import ClassVar

from benchmarks.host import remove_cgroups
from benchmarks.peers.base import Peer, drain_command, run_command, which

__all__ = ["Podman"]

LOCKS = Path("/dev/shm/libpod_lock")
"""podman's one file outside the folders that it is given."""


class Podman(Peer):
    """`podman run`, `podman exec`, `podman cp`."""

    name: ClassVar[str] = "podman"
    how: ClassVar[dict[str, str]] = {
        "create": "podman run --rm --network none --runtime crun IMAGE true, until the container is removed, as podman has it",
        "exec": "podman exec CONTAINER true",
        "streams": "podman exec CONTAINER with its stdout on a pipe; podman cp",
    }

    async def open(self, tree: Path, tar: Path, folder: Path) -> None:
        crun = which("crun")
        self._names = (f"dsec-bench-{os.getpid()}-{number}" for number in itertools.count())
        self._folder = folder / "podman"
        self._folder.mkdir()
        self._locks_were_there = LOCKS.exists()
        self._enter = await self._private_mounts()
        self._podman = [*self._enter, which("podman"), "--root", str(self._folder / "root"), "--runroot", str(self._folder / "run")]
        self._podman += [
            "--tmpdir",
            str(self._folder / "tmp"),
            "--runtime",
            crun,
            "--cgroup-manager",
            "cgroupfs",
            "--events-backend",
            "none",
        ]
        self._cgroup_parent = f"/dsec-bench-podman-{os.getpid()}"
        # podman asks for higher limits than its caller has, which fails without CAP_SYS_RESOURCE.
        processes = min(limit for limit in (*resource.getrlimit(resource.RLIMIT_NPROC), 32768) if limit > 0)
        self._run = [*self._podman, "run", "--rm", "--network", "none", "--cgroup-parent", self._cgroup_parent]
        self._run += ["--ulimit", "nofile=1024:1024", "--ulimit", f"nproc={processes}:{processes}"]
        try:
            await run_command([*self._podman, "import", str(tar), "dsec-bench"], timeout=300)
            await self.create()
        except BaseException:
            await self.aclose()
            raise

    async def _private_mounts(self) -> list[str]:
        """All commands run in one mount namespace, so that no mount of podman's stays. crun refuses a v1 host that also has a v2 hierarchy
        with a controller in it, so that hierarchy is not seen there. The way in costs each command about 1 ms.
        """
        script = "umount -l /sys/fs/cgroup/unified 2>/dev/null; echo ready; exec sleep infinity"
        argv = [which("unshare"), "--mount", "--propagation", "private", "sh", "-c", script]
        self._holder = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        with self._holder.stdout:
            self._holder.stdout.readline()
        return [which("nsenter"), f"--mount=/proc/{self._holder.pid}/ns/mnt"]

    async def aclose(self) -> None:
        """Removes containers and storage by podman's own hand, then what remains of the folder."""
        await run_command([*self._podman, "rm", "--all", "--force", "--time", "0"], timeout=300)
        await run_command([*self._podman, "rmi", "--all", "--force"], timeout=300)
        self._holder.terminate()
        self._holder.wait()
        if not self._locks_were_there:
            LOCKS.unlink(missing_ok=True)
        remove_cgroups(self._cgroup_parent)

    async def create(self) -> float:
        return await run_command([*self._run, "dsec-bench", "true"])

    async def start(self) -> str:
        name = next(self._names)
        await run_command([*self._run, "--detach", "--name", name, "dsec-bench", "sleep", "infinity"])
        return name

    async def remove(self, sandbox: str) -> None:
        await run_command([*self._podman, "rm", "--force", "--time", "0", sandbox])

    async def exec_true(self, sandbox: str) -> float:
        return await run_command([*self._podman, "exec", sandbox, "true"])

    async def stdout(self, sandbox: str, argv: list[str], size: int) -> float:
        return await drain_command([*self._podman, "exec", sandbox, *argv], size)

    async def copy_in(self, sandbox: str, local: Path, remote: str) -> float:
        return await run_command([*self._podman, "cp", str(local), f"{sandbox}:{remote}"], timeout=300)

    async def copy_out(self, sandbox: str, remote: str, local: Path) -> float:
        return await run_command([*self._podman, "cp", f"{sandbox}:{remote}", str(local)], timeout=300)
