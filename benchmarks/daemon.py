"""`dsec up` for one benchmark: a daemon with a state and a run folder of its own, ended by pid, with nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.host import (
    busy_seconds,
    cgroups_of,
    cpu_seconds,
    descendants,
    descriptor_count,
    mounts_below,
    peak_rss_bytes,
    process_name,
    processes_naming,
    unmount_below,
)
from benchmarks.measure import Block

__all__ = ["CpuMeter", "Daemon"]

_UP = "from dsec.cli import main; main()"
_UP_PROFILED = """
import cProfile, os, signal, sys
from dsec.cli import main
profile, target = cProfile.Profile(), sys.argv.pop(1)
def dump(*_):
    profile.disable()
    profile.dump_stats(target + ".partial")
    os.rename(target + ".partial", target)
signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
signal.signal(signal.SIGUSR2, dump)
main()
"""
MIB = 1 << 20


class Daemon:
    """The daemon's process and what belongs to it. `kill` and `start` again: sandboxes live on in between."""

    def __init__(self, folder: Path, run: Path, store: Path, *, profiled: bool = False) -> None:
        self.folder, self.run, self.state, self.store = folder, run, folder / "daemon-state", store
        self.url = f"unix://{run}/dsec.sock"
        self.log = folder / "dsec.log"
        self.profile = folder / "dsec.prof"
        self._profiled = profiled
        self._process: subprocess.Popen[bytes] | None = None
        self._peaks: dict[int, tuple[str, int]] = {}

    @property
    def pid(self) -> int:
        """Of the process that serves API and edge; 0 when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    async def start(self, deadline_s: float = 30) -> None:
        """Returns when the socket answers. RuntimeError with the end of its log if it does not come up."""
        self.state.mkdir(exist_ok=True)
        environment = os.environ | {"DSEC_RUN": str(self.run), "DSEC_STATE": str(self.state)}
        code = [_UP_PROFILED, str(self.profile)] if self._profiled else [_UP]
        folders = ["--state", str(self.state), "--run", str(self.run), "--store", str(self.store)]
        argv = [sys.executable, "-c", *code, "up", "--rm", *folders]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + deadline_s
        while not await self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dsec up does not answer:\n{self.log.read_text(errors='replace')[-2000:]}")
            await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(str(self.run / "dsec.sock"))
            writer.write(b"GET /v1/health HTTP/1.1\r\nHost: dsec\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            return b" 200 " in status
        return False

    async def profiled(self, work: Awaitable[Block]) -> Block:
        """`work` with the daemon under cProfile; the statistics are then in the file `profile`. For a daemon that was made `profiled`."""
        os.kill(self.pid, signal.SIGUSR1)
        block = await work
        os.kill(self.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 10
        while not self.profile.exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return block

    def kill(self) -> None:
        """SIGKILL to the daemon alone, as a crash would."""
        if self._process is not None:
            self.sample_peaks()
            self._process.kill()
            self._process.wait()

    async def stop(self) -> None:
        """TERM; then, so that the host is clean even if it is not, whatever still names the run folder is killed by pid and unmounted."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 60)
            except subprocess.TimeoutExpired:
                self.kill()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.pids() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        unmount_below(self.run)
        unmount_below(self.state)

    def pids(self) -> set[int]:
        """The daemon, the launcher, every aether and what is below them, also those that lost their parent to a kill."""
        return descendants({pid for pid in {self.pid, *processes_naming(str(self.run))} if pid})

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of client, daemon and whole machine. The whole less the two is the kernel's and the guests' part
        where nothing else runs; processes that end leave no other trace.
        """
        return {"client": time.process_time(), "edge": cpu_seconds(self.pid), "whole_machine": busy_seconds()}

    def sample_peaks(self) -> None:
        """Take note of each process' peak; call it while those that are of interest live."""
        for pid in self.pids():
            name = "edge" if pid == self.pid else process_name(pid)
            self._peaks[pid] = (name, max(peak_rss_bytes(pid), self._peaks.get(pid, ("", 0))[1]))

    def peak_rss_mb(self) -> dict[str, float]:
        """The largest peak so far by process name; `edge` is the daemon."""
        largest: dict[str, float] = {}
        for name, size in self._peaks.values():
            largest[name] = max(largest.get(name, 0.0), round(size / MIB, 2))
        return largest

    def holdings(self) -> dict[str, int]:
        """Kernel objects that the daemon holds now: what must not grow with the number of sandboxes that came and went."""
        scratch = self.state / "scratch"
        return {
            "processes": len(self.pids()),
            "edge_fds": descriptor_count(self.pid, except_socket=self.run / "dsec.sock"),
            "mounts": mounts_below(self.run, self.state),
            "cgroups": cgroups_of(self.run),
            "sockets": sum(1 for _ in (self.run / "sandboxes").iterdir()) if (self.run / "sandboxes").is_dir() else 0,
            "scratch_folders": sum(1 for _ in scratch.iterdir()) if scratch.is_dir() else 0,
        }


class CpuMeter:
    """Whose CPU time an operation takes: on a machine with few cores that is where the time goes once many are under way."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._used = dict.fromkeys(("client", "edge", "whole_machine"), 0.0)
        self._operations = 0

    def around(self, measure: Callable[[], Awaitable[Block]]) -> Callable[[], Awaitable[Block]]:
        """The same measurement, metered."""

        async def metered() -> Block:
            before = self._daemon.cpu_seconds()
            block = await measure()
            for name, seconds in self._daemon.cpu_seconds().items():
                self._used[name] += seconds - before[name]
            self._operations += len(block.samples_ms)
            return block

        return metered

    def to_json(self) -> dict[str, float]:
        """CPU ms an operation."""
        return {name: round(seconds * 1e3 / max(1, self._operations), 3) for name, seconds in self._used.items()}
