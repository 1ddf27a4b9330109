"""What the host is, and what it holds: memory, processes, mounts, cgroups and namespaces that are ours."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "busy_seconds",
    "cgroups_of",
    "cpu_seconds",
    "descendants",
    "describe_run",
    "descriptor_count",
    "kernel_memory_bytes",
    "meminfo",
    "memory_folder",
    "mounts_below",
    "network_namespaces",
    "peak_rss_bytes",
    "process_name",
    "processes_naming",
    "pss_bytes",
    "remove_cgroups",
    "unmount_below",
]

MIB = 1 << 20


def describe_run(benchmark: str) -> dict[str, Any]:
    """The head of every benchmark's JSON: where, when, on what and with which command the numbers were made."""
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": {
            "name": platform.node(),
            "cpu": _cpu_model(),
            "memory_mb": meminfo()["MemTotal"] // MIB,
            "python": platform.python_version(),
        },
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    values: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        values[name] = int(number) * (1024 if unit == "kB" else 1)
    return values


def kernel_memory_bytes() -> dict[str, int]:
    """What the kernel keeps for itself, by kind: slabs, stacks, page tables, per-cpu data."""
    values = meminfo()
    return {name: values.get(name, 0) for name in ("SUnreclaim", "SReclaimable", "KernelStack", "PageTables", "Percpu")}


def _status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def peak_rss_bytes(pid: int) -> int:
    """VmHWM: the most that was ever resident; 0 if the process is gone."""
    return _status(pid, "VmHWM")


def pss_bytes(pid: int) -> int:
    """Proportional set size; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(pid: int) -> float:
    """CPU time of the process; 0 if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def busy_seconds() -> float:
    """CPU time that all CPUs together were not idle, since boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def process_name(pid: int) -> str:
    """`comm`; empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(roots: Iterable[int]) -> set[int]:
    """`roots` that live and everything below them by parent pid."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if Path(f"/proc/{pid}").exists()]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def processes_naming(text: str) -> set[int]:
    """Processes whose command line or environment holds `text`: a private run folder marks all that belongs to it."""
    needle = text.encode()
    found: set[int] = set()
    for pid in _all_pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/cmdline").read_bytes() or needle in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    return found


def descriptor_count(pid: int, *, except_socket: Path | None = None) -> int:
    """Open file descriptors, without the listener on `except_socket` and the connections to it; 0 if the process is gone."""
    ours: set[str] = set()
    if except_socket is not None:
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        ours = {f"socket:[{fields[6]}]" for fields in lines if fields[7:] == [str(except_socket)]}
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/{pid}/fd/{name}") not in ours
    return count


def memory_folder(fallback: Path, room_bytes: int = 1 << 20) -> Path:
    """A folder in memory with that much room, else `fallback`: ext4 makes new inodes slowly where many were deleted seconds ago."""
    for folder in (Path("/run"), Path("/dev/shm")):
        if os.access(folder, os.W_OK) and _is_tmpfs(folder) and shutil.disk_usage(folder).free > room_bytes < meminfo()["MemAvailable"]:
            return folder
    return fallback


def _is_tmpfs(folder: Path) -> bool:
    points = {fields[4]: line.partition(" - ")[2].split()[0] for line in _mountinfo() if (fields := line.split())}
    return points.get(str(folder)) == "tmpfs"


def _mountinfo() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def mounts_below(*folders: Path) -> int:
    """Mounts in our own mount namespace at or below any of the folders."""
    prefixes = tuple(str(folder.resolve()) for folder in folders)
    count = 0
    for line in _mountinfo():
        point = line.split()[4]
        count += any(point == prefix or point.startswith(prefix + "/") for prefix in prefixes)
    return count


def network_namespaces() -> int:
    """Distinct network namespaces that some process is in."""
    found: set[str] = set()
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return len(found)


def cgroups_of(run: Path) -> int:
    """Cgroup folders, in every hierarchy, of the daemon whose run folder this is."""
    name = "dsec-" + hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
    count = 0
    for top in Path("/sys/fs/cgroup").rglob(name):
        count += sum(1 for _ in os.walk(top))
    return count


def unmount_below(folder: Path) -> None:
    """Let go of every mount below `folder`, the innermost first."""
    points = [line.split()[4] for line in _mountinfo()]
    for point in sorted((p for p in points if p.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", point], check=False, stderr=subprocess.DEVNULL)


def remove_cgroups(name: str) -> None:
    """Remove the cgroup `/name` and all below it from every hierarchy, as far as they are empty."""
    for folder in (*Path("/sys/fs/cgroup").glob(name.lstrip("/")), *Path("/sys/fs/cgroup").glob(f"*{name}")):
        for below, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(below)
