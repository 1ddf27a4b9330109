"""An inventory of kernel objects, so that a test or a benchmark can say what it left behind.

`take()` before, `take()` after, `found()` compares. An inventory holds strings that name each object well enough to find it by hand.
Objects of other programs on the machine never count.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsec.network.plan import link_prefix
from dsec.resources.plan import DAEMONS, instance_name

__all__ = ["HELD_ELSEWHERE", "Inventory", "cgroup_hierarchies", "children", "found", "of_instances", "take"]

CGROUP_ROOT = Path("/sys/fs/cgroup")
HELD_ELSEWHERE = "loop device held elsewhere"
"""A kind that is no leak: whoever unshares mounts (a container engine) takes a copy of ours, and the device stays until that copy goes."""
ANY_LINK = re.compile(r"d[0-9a-f]{8}x")
"""Names that dsec.network.plan.link_prefix gives."""


@dataclass(frozen=True)
class Inventory:
    """Kind to the objects of that kind."""

    objects: dict[str, frozenset[str]] = field(default_factory=dict)


def children(pid: int) -> Iterator[int]:
    """Children of every thread of `pid`; none if it is gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for task in tasks:
        try:
            yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except OSError:
            continue


def take(*, reaper_pid: int | None = None, node_wide: bool = False) -> Inventory:
    """What this process holds now.

    `reaper_pid`: a process to which orphans of ours go (see tests/conftest.py), whose descendants count too, except this process.
    `node_wide`: every object on the node that carries the project's name counts as well.
    """
    objects = {
        "fd": frozenset(_descriptors()),
        "thread": frozenset(_threads()),
        "process": frozenset(_processes(reaper_pid)),
    }
    if node_wide:
        objects |= {
            "mount": frozenset(_mounts(lambda point: "dsec" in point)),
            "cgroup": frozenset(_cgroups(lambda name: name.startswith("dsec-"))),
            "network": frozenset(_links(lambda name: ANY_LINK.match(name) is not None)),
        }
    return Inventory(objects)


def of_instances(folders: Iterable[Path]) -> Inventory:
    """Mounts, sandboxes' cgroups, loop devices and links of the instances with these state and run folders, whoever made them."""
    roots = [os.path.realpath(path) for path in folders]
    names = {instance_name(Path(root)) for root in roots}
    loops = list(_loops(roots))
    return Inventory(
        {
            "mount": frozenset(_mounts(lambda point: any(point == root or point.startswith(root + "/") for root in roots))),
            "cgroup": frozenset(_cgroups(names.__contains__)),
            "loop device": frozenset(device for device, holder in loops if holder is None),
            HELD_ELSEWHERE: frozenset(f"{device}, held by process {holder}" for device, holder in loops if holder is not None),
            "network": frozenset(_links(lambda link: any(link.startswith(link_prefix(name)) for name in names))),
        }
    )


def found(before: Inventory, after: Inventory) -> list[str]:
    """One line for each object that is new, `kind: object`."""
    return [f"{kind}: {item}" for kind, items in after.objects.items() for item in sorted(items - before.objects.get(kind, frozenset()))]


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}"
        except OSError:  # the descriptor of the listing itself
            continue


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not getattr(thread, "leak_exempt", False):
            yield f"{thread.name} ({thread.ident})"


def _describe(pid: int) -> str | None:
    """`pid command`, None for a process that is gone or dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else f"{pid} {command or name}"


def _processes(reaper_pid: int | None) -> Iterator[str]:
    own = os.getpid()
    pending = list(children(own))
    if reaper_pid is not None:
        pending += [pid for pid in children(reaper_pid) if pid != own]
    while pending:
        pid = pending.pop()
        pending += children(pid)
        if described := _describe(pid):
            yield described


def _mounts(ours: Callable[[str], bool]) -> Iterator[str]:
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            point = line.split(b" ", 5)[4].decode("utf-8", "surrogateescape")
            if ours(point):
                yield point


def cgroup_hierarchies() -> list[Path]:
    """The root of a pure v2 host, and those of every v1 hierarchy."""
    if not CGROUP_ROOT.is_dir():
        return []
    return [CGROUP_ROOT, *(path for path in CGROUP_ROOT.iterdir() if path.is_dir() and not path.is_symlink())]


def _cgroups(ours: Callable[[str], bool]) -> Iterator[str]:
    """Those of sandboxes; an instance's own group above them may stay, and the one of its daemons."""
    for parent in cgroup_hierarchies():
        for name in filter(ours, os.listdir(parent)):
            for folder, subfolders, _ in os.walk(parent / name):
                yield from (f"{folder}/{sub}" for sub in subfolders if sub != DAEMONS)


def _loops(roots: list[str]) -> Iterator[tuple[str, str | None]]:
    """Each with the process that alone holds it, if there is one."""
    for block in Path("/sys/block").glob("loop*"):
        try:
            backing = (block / "loop/backing_file").read_text().strip()
        except OSError:
            continue
        if any(backing.startswith(root + "/") for root in roots):
            yield f"{block.name} of {backing}", _foreign_holder(block.name)


def _foreign_holder(loop: str) -> str | None:
    """A process of another mount namespace in which the device is mounted; None if it is mounted here, or nowhere."""
    mounted = f" /dev/{loop} "
    if mounted in Path("/proc/self/mountinfo").read_text():
        return None
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mounted in Path(f"/proc/{pid}/mountinfo").read_text():
                return _describe(int(pid))
    return None


def _links(ours: Callable[[str], bool]) -> Iterator[str]:
    yield from (f"interface {name}" for name in filter(ours, os.listdir("/sys/class/net")))
