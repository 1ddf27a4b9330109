"""Probes of what limits, freezes and shrinks a sandbox."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.doctor.probing import Absent, Probe
from dsec.kernel import features

__all__ = ["PROBES"]

ROOT = Path("/sys/fs/cgroup")
NEEDED = ("cpu", "memory", "pids")


def _mode() -> str:
    if (ROOT / "cgroup.controllers").exists():
        return "v2"
    if (ROOT / "unified/cgroup.procs").exists():
        return "hybrid"
    if ROOT.is_dir() and any(ROOT.iterdir()):
        return "v1"
    raise Absent("/sys/fs/cgroup is not mounted")


def _v2_root() -> Path:
    mode = _mode()
    if mode == "v1":
        raise Absent("there is no v2 hierarchy")
    return ROOT if mode == "v2" else ROOT / "unified"


def _parent(controller: str) -> Path:
    """Where a group with this controller can be made."""
    if _mode() == "v2":
        if controller not in (ROOT / "cgroup.subtree_control").read_text().split():
            raise Absent(f"{controller} is not in {ROOT}/cgroup.subtree_control")
        return ROOT
    if not (ROOT / controller).is_dir():
        raise Absent(f"no v1 hierarchy of {controller}")
    return ROOT / controller


@contextmanager
def _group(parent: Path) -> Iterator[Path]:
    group = parent / f"dsec-doctor-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        # The last process of a group takes a moment to leave it.
        deadline = time.monotonic() + 1
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)


@contextmanager
def _sleeper(group: Path) -> Iterator[int]:
    """A process in the group that only waits."""
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)


def _controllers(_folder: Path) -> str:
    limits = {
        "v2": {"cpu": ("cpu.max", "50000 100000"), "memory": ("memory.max", "67108864"), "pids": ("pids.max", "100")},
        "v1": {"cpu": ("cpu.cfs_quota_us", "50000"), "memory": ("memory.limit_in_bytes", "67108864"), "pids": ("pids.max", "100")},
    }["v2" if _mode() == "v2" else "v1"]
    for controller in NEEDED:
        with _group(_parent(controller)) as group:
            name, value = limits[controller]
            (group / name).write_text(value)
    return f"{_mode()}; limits of {', '.join(NEEDED)} take"


def _freeze(_folder: Path) -> str:
    with _group(_v2_root()) as group, _sleeper(group):
        (group / "cgroup.freeze").write_text("1")
        deadline = time.monotonic() + 1
        while "frozen 1" not in (group / "cgroup.events").read_text():
            if time.monotonic() > deadline:
                raise Absent("cgroup.freeze takes, nothing freezes")
            time.sleep(0.001)
        (group / "cgroup.freeze").write_text("0")
    return "cgroup.freeze"


def _kill(_folder: Path) -> str:
    with _group(_v2_root()) as group, _sleeper(group):
        (group / "cgroup.kill").write_text("1")
    return "cgroup.kill"


def _clone_into(_folder: Path) -> str:
    with _group(_v2_root()) as group:
        descriptor = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
        os.waitpid(features.exit_in_cgroup(descriptor), 0)
        os.close(descriptor)
    return "clone3 with CLONE_INTO_CGROUP"


def _reclaim(_folder: Path) -> str:
    with _group(_parent("memory")) as group:
        for name, value in (("memory.reclaim", "1M"), ("memory.force_empty", "0")):
            if (group / name).exists():
                with contextlib.suppress(BlockingIOError):  # nothing to reclaim in an empty group
                    (group / name).write_text(value)
                return name
    raise Absent("neither memory.reclaim nor memory.force_empty")


def _swap(_folder: Path) -> str:
    active = Path("/proc/swaps").read_text().splitlines()[1:]
    if active:
        return f"{len(active)} in use, first {active[0].split()[0]}"
    if Path("/dev/zram0").exists() or Path("/sys/class/zram-control").exists():
        return "zram is there, no swap is on"
    raise Absent("no swap and no zram")


def _idle(_folder: Path) -> str:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(Absent), _group(_parent("cpu")) as group:
        if (group / "cpu.idle").exists():
            (group / "cpu.idle").write_text("1")
            return "SCHED_IDLE and cpu.idle"
    return "SCHED_IDLE"


def _limits(_folder: Path) -> str:
    # A sandbox that is alive costs: two processes of ours and the guest's, three mounts outside, a few descriptors of edge.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    mounts = int(Path("/proc/sys/fs/mount-max").read_text())
    seen = f"nofile {hard:,}, pid_max {pid_max:,}, mount-max {mounts:,}"
    if hard < 16384 or pid_max < 32768 or mounts < 50000:
        raise Absent(seen)
    return seen


PROBES = [
    Probe(
        "cgroup controllers",
        _controllers,
        "limits of CPU, memory and processes",
        "no container sandboxes",
        "a writable /sys/fs/cgroup; v2: +cpu +memory +pids in cgroup.subtree_control",
        required=True,
    ),
    Probe("cgroup freeze", _freeze, "pause", "no pause", "Linux 5.2 with a v2 hierarchy, hybrid is enough"),
    Probe(
        "cgroup kill",
        _kill,
        "ending a command's whole tree at once",
        "the tree is killed process by process",
        "Linux 5.14 with a v2 hierarchy",
    ),
    Probe(
        "clone into cgroup",
        _clone_into,
        "a command starts inside its limits",
        "it is moved there after its start",
        "Linux 5.7 with a v2 hierarchy",
    ),
    Probe(
        "memory reclaim", _reclaim, "pause gives memory back", "a paused sandbox keeps its memory", "Linux 5.19, or a v1 memory hierarchy"
    ),
    Probe(
        "swap or zram",
        _swap,
        "a place for what pause takes out",
        "a paused sandbox keeps its anonymous memory",
        "modprobe zram; mkswap, swapon",
    ),
    Probe(
        "SCHED_IDLE",
        _idle,
        "best-effort sandboxes behind the others",
        "all sandboxes share alike",
        "any kernel; in a container: CAP_SYS_NICE",
    ),
    Probe(
        "node limits",
        _limits,
        "thousands of sandboxes",
        "some hundreds of sandboxes",
        "ulimit -n 65536; sysctl kernel.pid_max=4194304 fs.mount-max=1000000",
    ),
]
