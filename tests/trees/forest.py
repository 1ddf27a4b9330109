"""Trees for tests: random ones, contents for their files, and how they look, as values and when the kernel shows them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import Phase
from hypothesis import strategies as st

from dsec.environments.erofs import write_image
from dsec.environments.trees import BLOCK, ORIGIN, Node, Pack, Segment, folder
from dsec.kernel import mounts
from dsec.kernel.erofs import mount_erofs

__all__ = ["PHASES", "Packs", "content", "file", "image_mounted", "link", "looks", "names", "overlay_mounted", "seen", "trees"]

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Of tests that mount: to shrink what fails would take minutes."""

FILE = stat.S_IFREG | 0o644


class Packs:
    """Packs of random bytes in a folder, and the way back from a file's segments to its content."""

    def __init__(self, folder: Path, count: int = 3, blocks: int = 64) -> None:
        self.folder = folder
        self.data: dict[str, bytes] = {}
        self.packs: list[Pack] = []
        for number in range(count):
            data = random.Random(number).randbytes(blocks * BLOCK)
            pack = Pack("sha256:" + hashlib.sha256(data).hexdigest(), len(data))
            self.path(pack).write_bytes(data)
            self.data[pack.digest] = data
            self.packs.append(pack)

    def path(self, pack: Pack) -> Path:
        return self.folder / pack.digest.removeprefix("sha256:")


def file(data: bytes = b"", **fields: Any) -> Node:
    """A small file, its content inline."""
    return Node(FILE, size=len(data), inline=data, **fields)


def link(target: bytes) -> Node:
    return Node(stat.S_IFLNK | 0o777, target=target)


def content(node: Node, packs: Packs | None) -> bytes:
    """What a file holds."""
    if node.inline is not None:
        return node.inline
    data = bytearray(node.size)
    for segment in node.segments:
        assert packs is not None
        piece = packs.data[segment.pack.digest][segment.start * BLOCK : (segment.start + segment.count) * BLOCK]
        end = min(node.size, segment.at * BLOCK + len(piece))
        data[segment.at * BLOCK : end] = piece[: end - segment.at * BLOCK]
    return bytes(data)


def looks(tree: Node, packs: Packs | None = None) -> dict[bytes, tuple[Any, ...]]:
    """All that a tree is: path to type and mode, owner, time, what it holds, xattrs, and its other names."""
    found: dict[bytes, tuple[Any, ...]] = {}
    others: dict[Node, list[bytes]] = {}
    waiting = [(b"", tree)]
    nodes: dict[bytes, Node] = {}
    while waiting:
        path, node = waiting.pop()
        nodes[path] = node
        if node.children is None:
            others.setdefault(node, []).append(path)
        waiting += [(path + b"/" + name, child) for name, child in (node.children or {}).items()]
    for path, node in nodes.items():
        held: Any = None
        if node.is_file:
            held = (node.size, hashlib.sha256(content(node, packs)).hexdigest())
        elif stat.S_ISLNK(node.mode):
            held = node.target
        elif stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode):
            held = node.rdev
        xattrs = {name: value for name, value in node.xattrs.items() if name != ORIGIN}
        found[path] = (node.mode, node.uid, node.gid, node.mtime_ns, held, xattrs, sorted(others.get(node, [])))
    return found


def seen(root: Path, *, count_links: bool = True) -> dict[bytes, tuple[Any, ...]]:
    """The same of a folder of the host, by plain system calls."""
    found: dict[bytes, tuple[Any, ...]] = {}
    others: dict[tuple[int, int], list[bytes]] = {}
    top = os.fsencode(root)
    paths = [top]
    for base, folders, files in os.walk(top):
        paths += [os.path.join(base, name) for name in (*folders, *files)]
    states = {path: os.lstat(path) for path in paths}
    for path, status in states.items():
        if not stat.S_ISDIR(status.st_mode):
            others.setdefault((status.st_dev, status.st_ino), []).append(path[len(top) :])
    for path, status in states.items():
        held: Any = None
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as opened:
                held = (status.st_size, hashlib.file_digest(opened, "sha256").hexdigest())
        elif stat.S_ISLNK(status.st_mode):
            held = os.readlink(path)
        elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            held = status.st_rdev
        xattrs = {
            os.fsencode(name): os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
            if os.fsencode(name) != ORIGIN
        }
        links = sorted(others.get((status.st_dev, status.st_ino), []))
        if links and count_links:
            assert len(links) == status.st_nlink, (path, links)
        found[path[len(top) :]] = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, held, xattrs, links)
    return found


@contextlib.contextmanager
def image_mounted(tree: Node, packs: Packs | None, place: Path) -> Iterator[Path]:
    """Write a tree's image to `place` and mount it there, as a node of DSec would."""
    place.mkdir()
    target = place / "mounted"
    target.mkdir()
    used = write_image(tree, place / "image")
    mount_erofs(place / "image", [packs.path(pack) for pack in used] if packs else [], target)
    try:
        yield target
    finally:
        mounts.unmount(target)


@contextlib.contextmanager
def overlay_mounted(lowers: list[Path], target: Path, upper: Path | None = None, work: Path | None = None) -> Iterator[Path]:
    """An overlay of folders, the lowest first, as containers have theirs: redirects are followed and made.

    Without devices: trees hold them with any number, and tests write to any name.
    """
    target.mkdir(exist_ok=True)
    options: list[tuple[str, str | int | None]] = [("lowerdir+", str(lower)) for lower in reversed(lowers)]
    if upper is not None:
        options += [("upperdir", str(upper)), ("workdir", str(work)), ("redirect_dir", "on")]
    else:
        options += [("redirect_dir", "follow")]
    mount = mounts.make_mount("overlay", options=options, attributes=mounts.ATTR_NODEV | mounts.ATTR_NOSUID)
    try:
        mounts.attach(mount, target)
    finally:
        os.close(mount)
    try:
        yield target
    finally:
        mounts.unmount(target)


# -- random trees --------------------------------------------------------------------------------------------------------------------

_name_bytes = st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b".."))
names = st.one_of(st.text("abc.-!", min_size=1, max_size=3).map(str.encode).filter(lambda name: name not in (b".", b"..")), _name_bytes)

_times = st.integers(-(10**18), 4 * 10**18)
_owners = st.one_of(st.just(0), st.integers(0, 2**32 - 2))
_modes = st.integers(0, 0o7777)
_xattrs = st.dictionaries(
    st.one_of(
        st.sampled_from([b"trusted.x", b"security.test", b"user.a"]),
        st.text("xyz.", min_size=1, max_size=20).map(lambda text: b"user." + text.encode()),
    ),
    st.one_of(st.binary(max_size=40), st.integers(1000, 5000).map(lambda size: b"v" * size)),
    max_size=3,
)


@st.composite
def _stored(draw: Any, packs: Packs) -> Node:
    """A file of segments and holes, in any order and from any pack."""
    at = 0
    segments = []
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 8))
        if draw(st.booleans()):
            pack = draw(st.sampled_from(packs.packs))
            segments.append(Segment(at, count, pack, draw(st.integers(0, pack.size // BLOCK - count))))
        at += count
    size = max(0, at * BLOCK - draw(st.integers(0, BLOCK - 1)))
    return Node(FILE, size=size, segments=tuple(segments))


@st.composite
def _leaves(draw: Any, packs: Packs) -> Node:
    kind = draw(st.sampled_from(["inline", "stored", "stored", "link", "device", "fifo", "socket"]))
    if kind == "inline":
        node = file(draw(st.one_of(st.binary(max_size=600), st.integers(3000, 9000).map(lambda size: b"i" * size))))
    elif kind == "stored":
        node = draw(_stored(packs))
    elif kind == "link":
        return link(draw(st.one_of(names, st.integers(1, 4095).map(lambda size: b"t" * size))))
    elif kind == "device":
        rdev = os.makedev(draw(st.integers(0, 4095)), draw(st.integers(0, 2**20 - 1)))
        node = Node(draw(st.sampled_from([stat.S_IFCHR, stat.S_IFBLK])), rdev=rdev)
    else:
        node = Node(stat.S_IFIFO if kind == "fifo" else stat.S_IFSOCK)
    node.mode = stat.S_IFMT(node.mode) | draw(_modes)
    if stat.S_ISREG(node.mode):
        node.xattrs = draw(_xattrs)
    return node


@st.composite
def trees(draw: Any, packs: Packs, largest: int = 40) -> Node:
    """A tree with everything in it: hard links, holes, odd names, owners and times."""
    root = folder()
    folders = [root]
    files: list[Node] = []
    for _ in range(draw(st.integers(0, largest))):
        parent = folders[draw(st.integers(0, len(folders) - 1))]
        name = draw(names)
        assert parent.children is not None
        if name in parent.children:
            continue
        kind = draw(st.integers(0, 9))
        if kind < 3:
            node = folder(draw(_modes))
            node.xattrs = draw(_xattrs)
            folders.append(node)
        elif kind == 3 and files:
            parent.children[name] = files[draw(st.integers(0, len(files) - 1))]
            continue
        else:
            node = draw(_leaves(packs))
            files.append(node)
        node.uid, node.gid, node.mtime_ns = draw(_owners), draw(_owners), draw(_times)
        parent.children[name] = node
    return root
