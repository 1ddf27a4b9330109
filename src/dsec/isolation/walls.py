"""Capabilities, hidden and read-only paths, and settings of a sandbox's namespaces. Data, but for what depends on id range and host."""

from __future__ import annotations

import os
import stat
from typing import Final, NamedTuple

__all__ = ["CAPABILITIES", "MASKED", "READ_ONLY", "SYS_SHOWN", "Masked", "capability_mask", "masked_here", "sysctls"]

CAPABILITIES: Final[dict[str, int]] = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18,
    "SETFCAP": 31,
}
"""The bounding set, by capability number. What package managers and su need, over the sandbox's own ids only. Not in it, though common
elsewhere: NET_RAW (ping works by ping_group_range), MKNOD, AUDIT_WRITE, SYS_PTRACE (not needed among one's own processes)."""

MASKED: Final = (
    # The host's keys and symbols. What only the host's root may open (kcore, kmsg, kpage*, slabinfo and the like) is closed to every id of
    # a sandbox anyway, and one mount more for each would cost every sandbox memory and time.
    "/proc/keys",
    "/proc/key-users",
    "/proc/kallsyms",
    "/proc/buddyinfo",
    # What the host runs, and on what.
    "/proc/acpi",
    "/proc/asound",
    "/proc/scsi",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/interrupts",
    "/proc/softirqs",
    "/proc/iomem",
    "/proc/ioports",
    "/proc/modules",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/schedstat",
    "/proc/timer_stats",
    "/proc/diskstats",
    "/proc/partitions",
    "/proc/swaps",
    "/proc/mdstat",
    "/proc/fs",
    "/proc/driver",
    "/proc/bus",
    "/proc/irq",
    "/proc/mtrr",
    "/proc/sysrq-trigger",
)


class Masked(NamedTuple):
    """The paths to hide, by what they are. What the kernel lacks may appear yet, with a module."""

    files: tuple[str, ...]
    folders: tuple[str, ...]
    unknown: tuple[str, ...]


SYS_SHOWN: Final = ("devices/system/cpu", "devices/system/node", "kernel/mm")
"""Below /sys. Nothing else of it is there: what programs look up is the processors and the page sizes."""

READ_ONLY: Final = ("/proc/sys",)


def sysctls(uid_base: int, uid_count: int) -> dict[str, str]:
    """Settings of the sandbox's own network namespace, by path below /proc/sys. It belongs to the host's user namespace, so the group range
    of ping is in host ids, and binding low ports is granted here rather than by a capability."""
    return {
        "net/ipv4/ip_unprivileged_port_start": "0",
        "net/ipv4/ping_group_range": f"{uid_base} {uid_base + uid_count - 1}",
    }


def masked_here() -> Masked:
    """`MASKED` on this host. A path of /proc that is there is a file, or a folder, for good."""
    kinds: dict[bool | None, list[str]] = {False: [], True: [], None: []}
    for path in MASKED:
        try:
            kinds[stat.S_ISDIR(os.stat(path).st_mode)].append(path)
        except OSError:
            kinds[None].append(path)
    return Masked(tuple(kinds[False]), tuple(kinds[True]), tuple(kinds[None]))


def capability_mask() -> int:
    """The bounding set as the kernel's bit mask."""
    return sum(1 << number for number in CAPABILITIES.values())
