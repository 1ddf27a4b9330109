"""The tree that a guest sees, read from outside through its init's root."""

from __future__ import annotations

import os
import stat
from pathlib import Path

KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo"}


def read(root: Path, base: int, *, times: bool = False) -> dict[bytes, tuple]:
    """All below `root`, ids counted from `base`: kind, mode, owner, group, content or target, xattrs, names of the same inode, and time."""
    found: dict[bytes, tuple] = {}
    links: dict[tuple[int, int], list[bytes]] = {}
    waiting = [b""]
    top = os.fsencode(root)
    while waiting:
        path = waiting.pop()
        status = os.lstat(top + path)
        kind = KINDS.get(stat.S_IFMT(status.st_mode), oct(status.st_mode))
        content = b""
        if kind == "folder":
            waiting += [path + b"/" + os.fsencode(name) for name in os.listdir(top + path)]
        elif kind == "file":
            content = Path(os.fsdecode(top + path)).read_bytes()
        elif kind == "symlink":
            content = os.readlink(top + path)
        names = links.setdefault((status.st_dev, status.st_ino), [])
        names.append(path)
        if kind != "folder":
            assert status.st_nlink >= len(names), "more names than links"
        found[path] = (
            kind,
            stat.S_IMODE(status.st_mode),
            status.st_uid - base,
            status.st_gid - base,
            content,
            tuple(sorted(_xattrs(top + path).items())),
            names,
            *((status.st_mtime_ns,) if times else ()),
        )
    return {path: (*seen[:6], tuple(sorted(seen[6])), *seen[7:]) for path, seen in found.items()}


def _xattrs(path: bytes) -> dict[bytes, bytes]:
    names = [os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False)]
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in names if name.startswith(b"user.")}
