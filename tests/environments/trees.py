"""Trees with everything in them that a file system can hold, and how to compare them."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["describe", "fill"]


def describe(root: str | Path) -> dict[str, tuple[Any, ...]]:
    """All that a tree is, but the numbers of its inodes: path to kind, mode, owner, time, content, xattrs and its other names.

    A folder with whiteouts has a mark in a layer that lies over others, which is no part of the tree.
    """
    root = Path(root)
    found: dict[str, tuple[Any, ...]] = {}
    names: dict[tuple[int, int], list[str]] = {}
    paths = [root, *sorted(Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files))]
    for path in paths:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            names.setdefault((status.st_dev, status.st_ino), []).append(str(path.relative_to(root)))
    for path in paths:
        status = path.lstat()
        content: Any = None
        if stat.S_ISREG(status.st_mode):
            content = (status.st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            content = (os.major(status.st_rdev), os.minor(status.st_rdev))
        names_of_xattrs = [name for name in os.listxattr(path, follow_symlinks=False) if name != "trusted.overlay.origin"]
        xattrs = {name: os.getxattr(path, name, follow_symlinks=False) for name in names_of_xattrs}
        others = names.get((status.st_dev, status.st_ino), [])
        found[str(path.relative_to(root))] = (
            stat.S_IFMT(status.st_mode),
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns,
            content,
            xattrs,
            others,
        )
    return found


def fill(root: Path) -> None:
    """One of each: modes, owners, times to the nanosecond, links, devices, holes, xattrs, odd names."""
    root.mkdir(exist_ok=True)
    (root / "a/b/c").mkdir(parents=True)
    (root / "a/file").write_bytes(os.urandom(10_000))
    (root / "a/empty").touch()
    (root / ".hidden").write_text("dot")
    (root / "a/b/..odd").write_text("two dots")
    (root / "a/with\nnewline and ünïcode").write_text("x")
    os.close(os.open(os.fsencode(root) + b"/a/byte\xff", os.O_CREAT | os.O_WRONLY, 0o600))
    (root / "set-uid").write_bytes(b"\x7fELF")
    os.chown(root / "set-uid", 1000, 1001)
    (root / "set-uid").chmod(0o6755)
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    os.link(root / "a/file", root / "a/b/same")
    (root / "link").symlink_to("a/file")
    (root / "dangling").symlink_to("/nowhere/at/all")
    (root / "loop").symlink_to("loop")
    os.mknod(root / "whiteout", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(root / "fifo", 0o640)
    os.setxattr(root / "a/file", "user.note", b"bytes \x00\xff\n")
    os.setxattr(root / "a/b", "trusted.overlay.opaque", b"y")
    # cap_net_raw=ep
    os.setxattr(root / "set-uid", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    os.chown(root / "a/b/c", 65534, 65534)
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, 1_000_000_000_000_000_123 + number), follow_symlinks=False)
    os.utime(root, ns=(0, 1_200_000_000_000_000_007))
