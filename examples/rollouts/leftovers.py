"""After the job: is anything of it left on the machine, outside its state folder?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dsec.testing import leaks

from .daemon import RUN_MARK

__all__ = ["KINDS", "left", "settle"]

KINDS = ("process", "mount", "cgroup", "loop device", "network", "file")


def settle(state: Path, run: Path, network_before: frozenset[str], *, seconds: float = 20.0) -> list[str]:
    """What is left once the kernel had `seconds` to finish what it does late (reaping, lazy unmounts). Blocks; run it in a thread."""
    deadline = time.monotonic() + seconds
    while (found := left(state, run, network_before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def left(state: Path, run: Path, network_before: frozenset[str]) -> list[str]:
    """One line an object."""
    inventory = leaks.of_instances([state, run])
    found = [f"{kind}: {item}" for kind, items in inventory.objects.items() for item in sorted(items)]
    found += [f"process: {item}" for item in _processes(run)]
    found += [f"cgroup: {path}" for path in _own_cgroups(run)]
    found += [f"network: {item}" for item in sorted(network() - network_before)]
    if run.exists():
        found.append(f"file: {run}")
    return found


def network() -> frozenset[str]:
    """Named network namespaces and interfaces of this project."""
    names = frozenset(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else frozenset()
    return names | {name for name in os.listdir("/sys/class/net") if name.startswith("dsec")}


def _own_cgroups(run: Path) -> Iterator[Path]:
    for hierarchy in leaks.cgroup_hierarchies():
        if (group := hierarchy / leaks.instance_cgroup(run)).is_dir():
            yield group


def _processes(run: Path) -> Iterator[str]:
    """Ours by the run folder in their environment, guests' by their cgroup."""
    mark, group = f"{RUN_MARK}={run}".encode(), f"/{leaks.instance_cgroup(run)}/"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            folder = Path("/proc") / pid
            if mark in (folder / "environ").read_bytes().split(b"\0") or group in (folder / "cgroup").read_text():
                yield f"{pid} {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace').strip()}"
