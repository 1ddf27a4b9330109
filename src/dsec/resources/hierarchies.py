"""Which cgroup hierarchies a host has: v1, v2 or both at once (hybrid). The parsing is pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["WANTED", "Hierarchies", "parse_mountinfo", "probe"]

WANTED: Final = ("cpu", "memory", "pids")
_V1_CONTROLLERS: Final = frozenset({"cpu", "cpuacct", "memory", "pids", "freezer"})


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """`v2` is the mount point of the unified hierarchy, `v2_controllers` those it has; `v1` maps other controllers to their mount points.

    A controller belongs to one hierarchy of the host only, so the two never overlap.
    """

    v2: str | None = None
    v2_controllers: frozenset[str] = frozenset()
    v1: dict[str, str] = field(default_factory=dict)
    v1_memsw: bool = False
    """The v1 memory controller accounts swap too."""
    v2_swap: bool = True
    """The v2 memory controller accounts swap. Known only where a group below the root has been made."""

    def has(self, controller: str) -> bool:
        return controller in self.v2_controllers or controller in self.v1


def _unescape(path: str) -> str:
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def parse_mountinfo(text: str) -> tuple[str | None, dict[str, str]]:
    """(mount point of cgroup2, v1 controller to mount point) from /proc/self/mountinfo. The first mount of each wins."""
    v2: str | None = None
    v1: dict[str, str] = {}
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not separator or len(left) < 5 or len(right) < 3:
            continue
        mount_point = _unescape(left[4])
        if right[0] == "cgroup2":
            v2 = v2 or mount_point
        elif right[0] == "cgroup":
            for option in right[2].split(","):
                if option in _V1_CONTROLLERS:
                    v1.setdefault(option, mount_point)
    return v2, v1


def probe(mountinfo: Path = Path("/proc/self/mountinfo")) -> Hierarchies:
    """What this host has now."""
    v2, v1 = parse_mountinfo(mountinfo.read_text())
    controllers: frozenset[str] = frozenset()
    if v2 is not None:
        controllers = frozenset((Path(v2) / "cgroup.controllers").read_text().split())
    memory = v1.get("memory")
    return Hierarchies(
        v2=v2,
        v2_controllers=controllers,
        v1={name: path for name, path in v1.items() if name not in controllers},
        v1_memsw=memory is not None and (Path(memory) / "memory.memsw.usage_in_bytes").exists(),
    )
