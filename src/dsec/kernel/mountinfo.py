"""Reading /proc/self/mountinfo."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mount", "mount_at", "mount_over", "mounts_below", "parse_mountinfo"]

_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line: where it is, of what kind, from where."""

    mount_id: int
    parent_id: int
    device: tuple[int, int]
    root: str
    target: str
    options: str
    kind: str
    source: str
    super_options: str


def _unescape(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match.group(1), 8)]), field))


def parse_mountinfo(text: bytes) -> list[Mount]:
    """All mounts, in the kernel's order: of two at one place the later lies on top."""
    mounts: list[Mount] = []
    for line in text.splitlines():
        fields = line.split(b" ")
        dash = fields.index(b"-", 6)
        major, minor = fields[2].split(b":")
        mounts.append(
            Mount(
                mount_id=int(fields[0]),
                parent_id=int(fields[1]),
                device=(int(major), int(minor)),
                root=_unescape(fields[3]),
                target=_unescape(fields[4]),
                options=fields[5].decode(),
                kind=fields[dash + 1].decode(),
                source=_unescape(fields[dash + 2]),
                super_options=_unescape(fields[dash + 3]),
            )
        )
    return mounts


def _read() -> list[Mount]:
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def mount_at(path: str | os.PathLike[str]) -> Mount | None:
    """The topmost mount whose target is exactly `path`, or None."""
    target = os.path.realpath(path)
    found = None
    for mount in _read():
        if mount.target == target:
            found = mount
    return found


def mount_over(path: str) -> Mount | None:
    """The mount that holds the absolute `path`, by the table alone: no call goes to a file system that may not answer."""
    found: Mount | None = None
    for mount in _read():
        if (path + "/").startswith(mount.target.rstrip("/") + "/") and (found is None or len(mount.target) >= len(found.target)):
            found = mount
    return found


def mounts_below(path: str | os.PathLike[str]) -> list[Mount]:
    """Mounts strictly below `path`, in the kernel's order."""
    prefix = os.path.realpath(path).rstrip("/") + "/"
    return [mount for mount in _read() if mount.target.startswith(prefix)]
