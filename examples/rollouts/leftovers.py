"""After the job: is anything of it left on the machine, outside its state folder?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dsec.resources.plan import instance_name
from dsec.testing import leaks

from .daemon import RUN_MARK

__all__ = ["KINDS", "left", "settle"]

KINDS = ("process", "mount", "cgroup", "loop device", "network", "file")


def settle(state: Path, run: Path, *, seconds: float = 30.0) -> list[str]:
    """What is left once `seconds` have passed, in which the kernel finishes what it does late. Blocks.

    Reaping and lazy unmounts take milliseconds; another program that copied the mount table (a system being built in a mount namespace)
    holds on to the disk image until it ends.
    """
    deadline = time.monotonic() + seconds
    while (found := left(state, run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def left(state: Path, run: Path) -> list[str]:
    """One line an object."""
    inventory = leaks.of_instances([state, run])
    found = [f"{kind}: {item}" for kind, items in inventory.objects.items() for item in sorted(items)]
    found += [f"process: {item}" for item in _processes(run)]
    found += [f"cgroup: {path}" for path in _own_cgroups(run)]
    if run.exists():
        found.append(f"file: {run}")
    return found


def _own_cgroups(run: Path) -> Iterator[Path]:
    for hierarchy in leaks.cgroup_hierarchies():
        if (group := hierarchy / instance_name(run)).is_dir():
            yield group


def _processes(run: Path) -> Iterator[str]:
    """Ours by the run folder in their environment, guests' by their cgroup."""
    mark, group = f"{RUN_MARK}={run}".encode(), f"/{instance_name(run)}/"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            folder = Path("/proc") / pid
            if mark in (folder / "environ").read_bytes().split(b"\0") or group in (folder / "cgroup").read_text():
                yield f"{pid} {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace').strip()}"
