"""Final admission: what this host can still take, from its own counters. A refusal is Overloaded: nothing ran, another node may."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from dsec.edge.settings import EdgeSettings
from libdsec.errors import Overloaded

__all__ = ["Admission", "HostHeadroom", "host_memory_mb", "read_headroom"]

PIDS_PER_SANDBOX = 3
"""aether, init and one session."""
FDS_PER_SANDBOX = 2
FDS_RESERVED = 512
MOUNTS_RESERVED = 1000
MEMORY_PER_SANDBOX_MB = 1
FRESH_SECONDS = 0.2
"""A reading this old is still used: a burst of thousands asks once per this time."""


@dataclass(frozen=True, slots=True)
class HostHeadroom:
    """What is left on the host."""

    memory_mb: int
    pids: int
    fds: int
    mounts: int


def host_memory_mb() -> int:
    """All memory of the host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def _meminfo_available_mb() -> int:
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) >> 10
    return host_memory_mb()


def _number(path: str, default: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return default


def read_headroom() -> HostHeadroom:
    """From /proc, some hundred microseconds."""
    # The fourth field of loadavg is "runnable/all": all tasks of the host (of our pid namespace's view of it).
    threads = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    pids = min(_number("/proc/sys/kernel/pid_max", 32768), _number("/proc/sys/kernel/threads-max", 1 << 22)) - threads
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = soft - len(os.listdir("/proc/self/fd")) - FDS_RESERVED
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = sum(1 for _ in file)
    return HostHeadroom(_meminfo_available_mb(), pids, fds, _number("/proc/sys/fs/mount-max", 100_000) - mounts - MOUNTS_RESERVED)


def raise_fd_limit() -> None:
    """As many descriptors as the hard limit gives: each sandbox holds a watch connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Admission:
    """Says how many of the wanted sandboxes may be made now, counting those that were admitted and are not yet seen in /proc."""

    def __init__(self, settings: EdgeSettings) -> None:
        self._settings = settings
        self._headroom: HostHeadroom | None = None
        self._read_at = 0.0
        self._since_reading = 0

    def headroom(self) -> HostHeadroom:
        """As of FRESH_SECONDS ago or now."""
        now = time.monotonic()
        if self._headroom is None or now - self._read_at > FRESH_SECONDS:
            self._headroom = read_headroom()
            self._read_at = now
            self._since_reading = 0
        return self._headroom

    def admit(self, wanted: int, live: int, launching: int) -> None:
        """Raise Overloaded unless `wanted` more fit beside `live`, of which `launching` are not finished."""
        settings = self._settings
        if live + wanted > settings.max_sandboxes:
            raise Overloaded(f"{live} sandboxes are live, at most {settings.max_sandboxes} fit on this node", cause="sandboxes")
        room = self.headroom()
        coming = wanted + max(launching, self._since_reading)
        if room.memory_mb - coming * MEMORY_PER_SANDBOX_MB < settings.memory_reserve_mb:
            raise Overloaded(f"{room.memory_mb} MB of memory are available, {settings.memory_reserve_mb} MB must stay free", cause="memory")
        if coming * PIDS_PER_SANDBOX > room.pids:
            raise Overloaded(f"{room.pids} more processes fit on this host (kernel.pid_max)", cause="pids")
        if coming * FDS_PER_SANDBOX > room.fds:
            raise Overloaded(f"{max(0, room.fds)} more descriptors fit in this process (ulimit -n)", cause="fds")
        if room.mounts < 0:
            raise Overloaded("the host's mount table is full (fs.mount-max)", cause="mounts")
        self._since_reading += wanted
