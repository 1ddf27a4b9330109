"""After the job: is anything of it left on the machine, outside its state folder?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsec.resources.plan import instance_name
from dsec.testing import leaks

from .daemon import RUN_MARK

__all__ = ["KINDS", "Leftovers", "look", "settle"]

KINDS = ("process", "mount", "cgroup", "loop device", "network", "file")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """One line an object."""

    left: list[str] = field(default_factory=list)
    """What the job should have ended and has not."""
    held: list[str] = field(default_factory=list)
    """What it has ended and another program still holds: a copy of the machine's mount table, made while the job ran, keeps the disk image
    open until that program ends (a container engine, a system being built)."""


def settle(state: Path, run: Path, *, seconds: float = 10.0) -> Leftovers:
    """What is there once nothing is left, or `seconds` have passed, in which the kernel finishes what it does late. Blocks."""
    deadline = time.monotonic() + seconds
    while (found := look(state, run)).left and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def look(state: Path, run: Path) -> Leftovers:
    """What is there now."""
    inventory = leaks.of_instances([state, run])
    held = [f"loop device: {item}" for item in sorted(inventory.objects[leaks.HELD_ELSEWHERE])]
    found = [f"{kind}: {item}" for kind, items in inventory.objects.items() if kind != leaks.HELD_ELSEWHERE for item in sorted(items)]
    found += [f"process: {item}" for item in _processes(run)]
    found += [f"cgroup: {path}" for path in _own_cgroups(run)]
    if run.exists():
        found.append(f"file: {run}")
    return Leftovers(found, held)


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


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
                yield f"{pid} {_command(pid)}"
