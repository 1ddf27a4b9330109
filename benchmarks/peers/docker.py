"""Docker with a daemon of its own: private socket, data and exec folders, no bridge, ended by pid.

`Docker` speaks the Engine API over the socket, as an SDK would; `DockerCommand` runs the `docker` command, as people do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from benchmarks.host import descendants, peak_rss_bytes, process_name, remove_cgroups, unmount_below
from benchmarks.peers.base import Peer, PeerUnavailable, drain_command, run_command, which

__all__ = ["Docker", "DockerCommand"]

IMAGE = "dsec-bench"


class _Daemon:
    """One dockerd, shared by the two peers that need it: started by the first, ended when the last lets go."""

    _running: ClassVar[_Daemon | None] = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "docker.sock"
        self.cgroup_parent = f"/dsec-bench-docker-{os.getpid()}"
        self.users = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.peaks: dict[int, tuple[str, int]] = {}

    @classmethod
    async def use(cls, tar: Path, folder: Path) -> _Daemon:
        if cls._running is None:
            daemon = cls(folder / "docker")
            cls._running = daemon
            try:
                await daemon._start(tar)
            except BaseException:
                cls._running = None
                await daemon._stop()
                raise
        cls._running.users += 1
        return cls._running

    async def _start(self, tar: Path) -> None:
        self.folder.mkdir()
        argv = [
            which("dockerd"),
            "--host",
            f"unix://{self.socket}",
            "--pidfile",
            str(self.folder / "pid"),
            "--iptables=false",
            "--bridge=none",
        ]
        argv += ["--data-root", str(self.folder / "data"), "--exec-root", str(self.folder / "exec"), "--log-level", "warn"]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        connector = aiohttp.UnixConnector(str(self.socket), limit=256)
        self.session = aiohttp.ClientSession(connector=connector, base_url="http://docker", timeout=aiohttp.ClientTimeout(total=300))
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self.session.get("/_ping") as answer:
                    if answer.status == 200:
                        break
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise PeerUnavailable(f"dockerd does not start: {(self.folder / 'log').read_text()[-300:]}")
            await asyncio.sleep(0.05)
        with tar.open("rb") as archive:
            async with self.session.post("/images/create", params={"fromSrc": "-", "repo": IMAGE, "tag": "latest"}, data=archive) as answer:
                text = await answer.text()
                if answer.status != 200 or "errorDetail" in text:
                    raise PeerUnavailable(f"docker import: {text[-300:]}")

    async def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            type(self)._running = None
            await self._stop()

    def sample_peaks(self) -> None:
        if self.process is not None:
            for pid in descendants([self.process.pid]):
                self.peaks[pid] = (process_name(pid), max(peak_rss_bytes(pid), self.peaks.get(pid, ("", 0))[1]))

    async def _stop(self) -> None:
        """TERM ends dockerd, its containerd and what they hold; whatever stays after the deadline is killed by pid and unmounted."""
        if hasattr(self, "session"):
            await self.session.close()
        if self.process is not None:
            family = descendants([self.process.pid])
            self.process.terminate()
            try:
                await asyncio.to_thread(self.process.wait, 30)
            except subprocess.TimeoutExpired:
                for pid in family:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(self.process.wait)
        unmount_below(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        remove_cgroups(self.cgroup_parent)


class _DockerPeer(Peer):
    daemon: _Daemon

    async def open(self, tree: Path, tar: Path, folder: Path) -> None:
        self.daemon = await _Daemon.use(tar, folder)
        try:
            await self.create()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        await self.daemon.release()

    def peak_rss_mb(self) -> dict[str, float]:
        self.daemon.sample_peaks()
        largest: dict[str, float] = {}
        for name, size in self.daemon.peaks.values():
            largest[name] = max(largest.get(name, 0.0), round(size / (1 << 20), 1))
        return largest


class Docker(_DockerPeer):
    """The Engine API without the command: what Docker costs a program."""

    name: ClassVar[str] = "docker"
    how: ClassVar[dict[str, str]] = {
        "create": "Engine API on the socket: create, start, wait for its own command `true`; network none; removal not in the latency",
        "exec": "Engine API on the socket: exec create, start, read to the end, inspect for the exit code",
        "fork": "Engine API on the socket: commit with pause, then create and start of each",
    }

    no_streams: ClassVar[str] = "measured as docker_command: people copy files and stream output with the command"

    async def _ask(self, method: str, path: str, body: Any = None, params: dict[str, str] | None = None) -> Any:
        async with self.daemon.session.request(method, path, json=body, params=params) as answer:
            if answer.status >= 400:
                raise RuntimeError(f"docker {method} {path}: {answer.status} {(await answer.text())[:300]}")
            return await answer.json() if "json" in answer.content_type else await answer.read()

    async def _make(self, command: list[str], image: str = IMAGE) -> str:
        limits = {"NetworkMode": "none", "CgroupParent": self.daemon.cgroup_parent}
        made = await self._ask("POST", "/containers/create", {"Image": image, "Cmd": command, "HostConfig": limits})
        return str(made["Id"])

    async def create(self) -> float:
        started = time.perf_counter()
        identifier = await self._make(["true"])
        try:
            ended = asyncio.ensure_future(self._ask("POST", f"/containers/{identifier}/wait", params={"condition": "next-exit"}))
            try:
                await self._ask("POST", f"/containers/{identifier}/start")
                outcome = await ended
            finally:
                ended.cancel()
            took = time.perf_counter() - started
            if outcome["StatusCode"] != 0:
                raise RuntimeError(f"docker: {outcome}")
        finally:
            await self.remove(identifier)
        return took

    async def start(self) -> str:
        return await self.start_from(IMAGE)

    async def start_from(self, image: str) -> str:
        identifier = await self._make(["sleep", "infinity"], image)
        await self._ask("POST", f"/containers/{identifier}/start")
        return identifier

    async def commit(self, sandbox: str, image: str) -> float:
        started = time.perf_counter()
        await self._ask("POST", "/commit", {}, params={"container": sandbox, "repo": image, "pause": "1"})
        return time.perf_counter() - started

    async def remove(self, sandbox: str) -> None:
        await self._ask("DELETE", f"/containers/{sandbox}", params={"force": "1"})

    async def exec_true(self, sandbox: str) -> float:
        return await self.run(sandbox, ["true"])

    async def run(self, sandbox: str, argv: list[str]) -> float:
        started = time.perf_counter()
        made = await self._ask("POST", f"/containers/{sandbox}/exec", {"Cmd": argv, "AttachStdout": True, "AttachStderr": True})
        await self._ask("POST", f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        outcome = await self._ask("GET", f"/exec/{made['Id']}/json")
        took = time.perf_counter() - started
        if outcome["ExitCode"] != 0:
            raise RuntimeError(f"docker exec: {outcome['ExitCode']}")
        return took


class DockerCommand(_DockerPeer):
    """The `docker` command on the same daemon."""

    name: ClassVar[str] = "docker_command"
    how: ClassVar[dict[str, str]] = {
        "create": "docker run --rm --network none IMAGE true",
        "exec": "docker exec CONTAINER true",
        "streams": "docker exec CONTAINER with its stdout on a pipe; docker cp",
    }

    async def open(self, tree: Path, tar: Path, folder: Path) -> None:
        self._docker = [which("docker"), "--host", f"unix://{folder / 'docker' / 'docker.sock'}"]
        self._names = (f"dsec-bench-{os.getpid()}-{number}" for number in itertools.count())
        await super().open(tree, tar, folder)

    def _run(self, *options: str) -> list[str]:
        return [*self._docker, "run", "--rm", "--network", "none", "--cgroup-parent", self.daemon.cgroup_parent, *options, IMAGE]

    async def create(self) -> float:
        return await run_command([*self._run(), "true"])

    async def start(self) -> str:
        name = next(self._names)
        await run_command([*self._run("--detach", "--name", name), "sleep", "infinity"])
        return name

    async def remove(self, sandbox: str) -> None:
        await run_command([*self._docker, "rm", "--force", sandbox])

    async def exec_true(self, sandbox: str) -> float:
        return await run_command([*self._docker, "exec", sandbox, "true"])

    async def stdout(self, sandbox: str, argv: list[str], size: int) -> float:
        return await drain_command([*self._docker, "exec", sandbox, *argv], size)

    async def copy_in(self, sandbox: str, local: Path, remote: str) -> float:
        return await run_command([*self._docker, "cp", "--quiet", str(local), f"{sandbox}:{remote}"], timeout=300)

    async def copy_out(self, sandbox: str, remote: str, local: Path) -> float:
        return await run_command([*self._docker, "cp", "--quiet", f"{sandbox}:{remote}", str(local)], timeout=300)
