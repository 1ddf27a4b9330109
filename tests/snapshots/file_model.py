"""A plain model of a tree of files and of what can be done to it. Each operation changes the model and gives the line for filer.c."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

NAMES = [b"a", b"b", b"c", b"d e", "\u00fc".encode(), b"new\nline", b".wh.a", b"\xff\xfe", b"x" * 200]
TARGETS = [b"a", b"../b", b"/etc/passwd", b"nowhere/" + b"t" * 100, b"\xff"]
XATTRS = [b"user.one", b"user.two"]
MOST_ENTRIES = 60
DEEPEST = 4


@dataclass(eq=False)
class Entry:
    """One inode."""

    kind: str
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    data: bytearray = field(default_factory=bytearray)
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    lower: bool = False
    """It has several names in a read-only layer: changed by one of them, the others keep what it was. So does overlayfs with any image."""
    old: bool = False
    """It was in a read-only layer. A new link to such an inode is shown with another inode number, overlayfs being what it is."""

    def copy(self) -> Entry:
        return Entry(self.kind, self.mode, self.uid, self.gid, bytearray(self.data), self.target, dict(self.xattrs), old=self.old)


class Model:
    """Paths below a folder to entries; hard links are one entry under several paths."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {b"": Entry("folder")}

    def copy(self) -> Model:
        made = Model()
        copies = {id(entry): entry.copy() for entry in self.entries.values()}
        made.entries = {path: copies[id(entry)] for path, entry in self.entries.items()}
        return made

    def becomes_a_layer(self) -> None:
        """From now on it lies below, and what is changed is copied up first."""
        names: dict[int, int] = {}
        for entry in self.entries.values():
            names[id(entry)] = names.get(id(entry), 0) + 1
        for entry in self.entries.values():
            entry.lower = names[id(entry)] > 1
            entry.old = True

    def up(self, path: bytes) -> Entry:
        """The entry to change."""
        entry = self.entries[path]
        if entry.lower:
            entry = self.entries[path] = entry.copy()
        return entry

    def seen(self) -> dict[bytes, tuple]:
        """Comparable with what `guest_tree.read` gives, but for times."""
        links: dict[int, list[bytes]] = {}
        for path, entry in self.entries.items():
            links.setdefault(id(entry), []).append(path)
        return {
            path: (
                entry.kind,
                0o777 if entry.kind == "symlink" else entry.mode,
                entry.uid,
                entry.gid,
                bytes(entry.data) if entry.kind == "file" else entry.target,
                tuple(sorted(entry.xattrs.items())),
                tuple(sorted(links[id(entry)])),
            )
            for path, entry in self.entries.items()
        }

    def of(self, *kinds: str) -> list[bytes]:
        return sorted(path for path, entry in self.entries.items() if path and entry.kind in kinds)

    def folders(self) -> list[bytes]:
        return [b"", *self.of("folder")]

    def below(self, path: bytes) -> list[bytes]:
        return [each for each in self.entries if each.startswith(path + b"/")]

    def free(self) -> list[bytes]:
        """Paths where something can be made."""
        if len(self.entries) >= MOST_ENTRIES:
            return []
        parents = [path for path in self.folders() if path.count(b"/") < DEEPEST]
        return [path + b"/" + name for path in parents for name in NAMES if path + b"/" + name not in self.entries]


def draw_operation(draw, model: Model, root: bytes) -> list[str]:
    """One thing that can be done to `model` as it is, done to it; the lines that do it to the folder `root` of a guest."""
    lines: list[str] = []

    def say(op: str, path: bytes, *arguments: bytes | int) -> None:
        words = [op, _hexed(root + path)]
        words += [_hexed(each) if isinstance(each, bytes) else _hexed(str(each).encode()) for each in arguments]
        lines.append(" ".join(words))

    def pick(values):
        return draw(st.sampled_from(values))

    entries = model.entries
    free, files, folders = model.free(), model.of("file"), model.of("folder")
    others = model.of("file", "symlink", "fifo")
    linkable = [path for path in others if not entries[path].old]
    empty = [path for path in folders if not model.below(path)]
    choices = []
    if free:
        choices += ["create", "create", "mkdir", "mkdir", "symlink", "mkfifo"]
        if linkable:
            choices += ["link"]
    if files:
        choices += ["write", "append", "truncate", "punch", "setxattr", "overwrite"]
    if others:
        choices += ["unlink", "unlink", "rename"]
    if folders:
        choices += ["rename-folder", "rename-folder", "chmod", "chown", "setxattr"]
    if empty:
        choices += ["rmdir"]
    if folders:
        choices += ["remove-tree"]
    op = pick(choices)
    if op in ("create", "mkdir", "symlink", "mkfifo"):
        path = pick(free)
        if op == "create":
            data = draw(_contents)
            entries[path] = Entry("file", 0o644, data=bytearray(data))
            say(op, path, data)
        elif op == "mkdir":
            entries[path] = Entry("folder")
            say(op, path)
        elif op == "symlink":
            target = pick(TARGETS)
            entries[path] = Entry("symlink", target=target)
            say(op, path, target)
        else:
            entries[path] = Entry("fifo", 0o644)
            say(op, path)
    elif op == "link":
        old, new = pick(linkable), pick(free)
        entries[new] = model.up(old)
        say(op, old, root + new)
    elif op in ("write", "append", "truncate", "punch"):
        path = pick(files)
        data = model.up(path).data
        if op == "append":
            more = draw(_contents)
            data += more
            say(op, path, more)
        elif op == "truncate":
            size = draw(st.sampled_from([0, 1, 511, 4096, 70_000, 1_200_000]))
            del data[size:]
            data.extend(bytes(size - len(data)))
            say(op, path, size)
        elif op == "write":
            offset, more = draw(st.sampled_from([0, 5, 4095, 66_000, 300_000])), draw(_contents)
            if more:
                data.extend(bytes(max(0, offset + len(more) - len(data))))
                data[offset : offset + len(more)] = more
            say(op, path, offset, more)
        else:
            offset, length = draw(st.sampled_from([(0, 4096), (4096, 65536), (100, 5000)]))
            end = min(len(data), offset + length)
            if end > offset:
                data[offset:end] = bytes(end - offset)
            say(op, path, offset, length)
    elif op == "overwrite":
        # as editors and installers do it: a new file takes the name of an old one
        old = pick(files)
        fresh = old + b".tmp"
        data = draw(_contents)
        entries[old] = Entry("file", 0o644, data=bytearray(data))
        say("create", fresh, data)
        say("rename", fresh, root + old)
    elif op == "unlink":
        path = pick(others)
        del entries[path]
        say(op, path)
    elif op == "rmdir":
        path = pick(empty)
        del entries[path]
        say(op, path)
    elif op == "remove-tree":
        path = pick(folders)
        for each in sorted([path, *model.below(path)], key=len, reverse=True):
            say("rmdir" if entries[each].kind == "folder" else "unlink", each)
            del entries[each]
    elif op == "rename":
        old = pick(others)
        # onto another name of the same inode a rename does nothing
        onto = [path for path in others if entries[path] is not entries[old]]
        new = pick((free or onto) + onto) if free or onto else None
        if new is not None:
            model.up(old)
            entries[new] = entries.pop(old)
            say("rename", old, root + new)
    elif op == "rename-folder":
        old = pick(folders)
        depth = max(each.count(b"/") for each in [old, *model.below(old)]) - old.count(b"/")
        onto = [path for path in empty if path != old and not path.startswith(old + b"/") and not old.startswith(path + b"/")]
        new = [path for path in free if not path.startswith(old + b"/") and path.count(b"/") + depth <= DEEPEST + 1] + onto
        if new:
            path = pick(new)
            moved = {path + each[len(old) :]: entries[each] for each in [old, *model.below(old)]}
            for each in [old, *model.below(old)]:
                del entries[each]
            entries.update(moved)
            say("rename", old, root + path)
    elif op == "chmod":
        path = pick(folders + files)
        entry = model.up(path)
        entry.mode = pick([0o700, 0o1777, 0o000] if entry.kind == "folder" else [0o700, 0o000, 0o644, 0o444])
        say(op, path, entry.mode)
    elif op == "chown":
        path = pick(folders + others)
        entry = model.up(path)
        entry.uid, entry.gid = pick([0, 1, 1000, 65534]), pick([0, 7, 1000])
        say(op, path, entry.uid, entry.gid)
    elif op == "setxattr":
        path, name, value = pick(folders + files), pick(XATTRS), draw(st.binary(max_size=20))
        model.up(path).xattrs[name] = value
        say(op, path, name, value)
    return lines


_contents = st.one_of(
    st.binary(max_size=40), st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.sampled_from([513, 5000, 70_000]))
)


def _hexed(value: bytes) -> str:
    return "x" + value.hex()
