"""From limits to cgroups: which folders, values and files a sandbox gets. Pure.

    <v2 or each v1 controller>/dsec-<instance>/          made at the start; on v2 it delegates its controllers downwards
                              |-- daemons/               (v2) the launcher and every aether, out of the sandboxes' accounts
                              `-- <sandbox>/             the limits; init sits here
                                  `-- s-<session>/       (v2, else the last of v1) made by chronus, for killing a session's tree whole

A sandbox's own group hands no controller to its children, so v2's rule against processes in inner groups does not bite: init may sit in it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.resources.hierarchies import WANTED, Hierarchies

__all__ = ["DAEMONS", "CgroupPlan", "Limits", "instance_dirs", "instance_name", "plan_cgroups"]

DAEMONS: Final = "daemons"
CPU_PERIOD_US: Final = 100_000  # of the kernel too, so that v1 needs no second write
MIN_QUOTA_US: Final = 1_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use; None where there is no limit."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None


@dataclass(frozen=True, slots=True)
class CgroupPlan:
    """Absolute paths. `writes` happen after all `dirs` are made; each process that joins writes "0" to every file of `joins`.

    `v2` is the folder to be cloned into and below which sessions make theirs.
    """

    dirs: tuple[str, ...]
    writes: tuple[tuple[str, str], ...]
    joins: tuple[str, ...]
    v2: str | None
    oom_file: str | None
    memory_usage_file: str | None
    memory_peak_file: str | None
    cpu_usage_file: str | None
    pids_file: str | None
    freeze_file: str | None


def instance_name(run: Path) -> str:
    """The folder of the instance whose run folder this is."""
    return "dsec-" + hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:8]


def instance_dirs(hierarchies: Hierarchies, instance: str) -> tuple[str, ...]:
    """The instance's folders, one a hierarchy."""
    mounts = dict.fromkeys(_v1_mounts(hierarchies))
    if hierarchies.v2 is not None:
        mounts[hierarchies.v2] = None
    return tuple(f"{mount}/{instance}" for mount in mounts)


def _v1_mounts(hierarchies: Hierarchies) -> list[str]:
    """Mount points in use, once each where controllers are mounted together. A v2 hierarchy counts CPU time and freezes, with or without
    controllers; only without it are those v1 groups made, the freezer last."""
    names = [*WANTED] if hierarchies.v2 is not None else [*WANTED, "cpuacct", "freezer"]
    return list(dict.fromkeys(hierarchies.v1[name] for name in names if name in hierarchies.v1))


def plan_cgroups(hierarchies: Hierarchies, instance: str, sandbox: str, limits: Limits) -> CgroupPlan:
    """The plan for one sandbox. A limit whose controller the host lacks is left out; whether that is acceptable is the backend's to say."""

    def v1(controller: str, name: str) -> str | None:
        mount = hierarchies.v1.get(controller)
        return f"{mount}/{instance}/{sandbox}/{name}" if mount is not None else None

    def v2(controller: str, name: str) -> str | None:
        return f"{folder}/{name}" if folder is not None and controller in hierarchies.v2_controllers else None

    v1_dirs = [f"{mount}/{instance}/{sandbox}" for mount in _v1_mounts(hierarchies)]
    folder = f"{hierarchies.v2}/{instance}/{sandbox}" if hierarchies.v2 is not None else None
    writes: list[tuple[str, str]] = []

    def write(path: str | None, value: str) -> None:
        if path is not None:
            writes.append((path, value))

    if limits.memory_bytes is not None:
        write(v2("memory", "memory.max"), str(limits.memory_bytes))
        if hierarchies.v2_swap:
            write(v2("memory", "memory.swap.max"), "0")
        write(v1("memory", "memory.limit_in_bytes"), str(limits.memory_bytes))
        if hierarchies.v1_memsw:
            write(v1("memory", "memory.memsw.limit_in_bytes"), str(limits.memory_bytes))
        else:
            write(v1("memory", "memory.swappiness"), "0")
    if limits.cpu_cores is not None:
        quota = max(MIN_QUOTA_US, round(limits.cpu_cores * CPU_PERIOD_US))
        write(v2("cpu", "cpu.max"), f"{quota} {CPU_PERIOD_US}")
        write(v1("cpu", "cpu.cfs_quota_us"), str(quota))
    if limits.pids is not None:
        write(v2("pids", "pids.max"), str(limits.pids))
        write(v1("pids", "pids.max"), str(limits.pids))
    return CgroupPlan(
        dirs=(*v1_dirs, *((folder,) if folder is not None else ())),
        writes=tuple(writes),
        joins=tuple(f"{path}/tasks" for path in v1_dirs),
        v2=folder,
        oom_file=v2("memory", "memory.events") or v1("memory", "memory.oom_control"),
        memory_usage_file=v2("memory", "memory.current") or v1("memory", "memory.usage_in_bytes"),
        memory_peak_file=v2("memory", "memory.peak") or v1("memory", "memory.max_usage_in_bytes"),
        cpu_usage_file=f"{folder}/cpu.stat" if folder is not None else v1("cpuacct", "cpuacct.usage"),
        pids_file=v2("pids", "pids.current") or v1("pids", "pids.current"),
        freeze_file=f"{folder}/cgroup.freeze" if folder is not None else v1("freezer", "freezer.state"),
    )
