"""The files of one commit, without the repository: its history may hold the answer to the task.

Only plumbing that gives objects as they are stored is asked. `git log`, `git archive` and a checkout obey what a repository from elsewhere
says in its configuration and attributes: which command proves signatures, which filters files, which files are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from dsec.environments.sources.archives import Budget
from dsec.environments.sources.builder import TreeBuilder
from dsec.environments.sources.gitplace import check_place
from dsec.environments.sources.refusals import damaged, refuse
from dsec.environments.tools import leashed, run_tool
from dsec.environments.trees import AddContent, Node
from libdsec.errors import DSecError, InvalidArgument

__all__ = ["export_commit"]

_PIECE: Final = 1 << 18
_COMMIT_LIMIT: Final = 1 << 20
_ENTRY_LIMIT: Final = 1 << 16
_TARGET_LIMIT: Final = 4095
_TIME_LIMIT: Final = 1 << 33
_COMMITTER: Final = re.compile(rb"^committer [^\n]*> (-?\d{1,20}) [+-]\d+$", re.MULTILINE)

_SETTINGS: Final = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
}
"""A partial clone would fetch what it lacks by whatever command its own configuration names. It can allow itself each protocol that
`protocol.allow` forbids, but none that GIT_ALLOW_PROTOCOL does not name; not each git knows GIT_NO_LAZY_FETCH."""

_OVERRIDES: Final = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "protocol.allow=never", "log.showSignature=false")


def _git(repository: Path, *arguments: str) -> list[str]:
    settings = [word for setting in (f"safe.directory={repository}", *_OVERRIDES) for word in ("-c", setting)]
    return ["git", "--no-pager", *settings, "-C", str(repository), *arguments]


def _environment() -> dict[str, str | None]:
    """What is inherited may name another repository than the one that is given, or files to write to."""
    return {**{name: None for name in os.environ if name.startswith("GIT_")}, **_SETTINGS}


def export_commit(
    repository: Path, revision: str, builder: TreeBuilder, add: AddContent, budget: Budget, progress: Callable[[int], None]
) -> dict[str, str]:
    """Put the commit's files in `builder`, dated as it is, and return which commit it was. Submodules become empty folders."""
    check_place(repository)
    try:
        commit = run_tool(
            _git(repository, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}"), environment=_environment()
        ).decode().strip()  # fmt: skip
    except DSecError as error:
        if error.cause != "tool-failed":
            raise
        raise InvalidArgument(f"source: {repository} has no commit {revision!r:.200}: {error.message}", field="source") from error
    done = 0
    with _objects(repository) as read:
        mtime = _time_of(b"".join(read(commit, b"commit", _COMMIT_LIMIT)[1]))
        builder.put(b"", Node(stat.S_IFDIR | 0o755, mtime_ns=mtime, children={}))
        for mode, kind, identifier, name in _listing(repository, commit):
            if kind == b"commit":
                node = Node(stat.S_IFDIR | 0o755, mtime_ns=mtime, children={})
            elif stat.S_ISLNK(mode):
                node = Node(stat.S_IFLNK | 0o777, mtime_ns=mtime, target=b"".join(read(identifier, b"blob", _TARGET_LIMIT)[1]))
            else:
                length, pieces = read(identifier, b"blob")
                budget.spend(length)
                size, inline, segments = add(pieces, length)
                permissions = 0o755 if mode & 0o100 else 0o644
                node = Node(stat.S_IFREG | permissions, mtime_ns=mtime, size=size, inline=inline, segments=segments)
            if not name.strip(b"/"):
                refuse(name, "has no name")
            builder.put(name, node)
            done += node.size
            progress(done)
    return {"commit": commit}


def _time_of(commit: bytes) -> int:
    """When it was committed, in nanoseconds; one before 1970 becomes 1970."""
    found = _COMMITTER.search(commit.partition(b"\n\n")[0])
    if found is None:
        raise damaged("the commit says not when it was made")
    return min(max(int(found[1]), 0), _TIME_LIMIT) * 1_000_000_000


def _listing(repository: Path, commit: str) -> Iterator[tuple[int, bytes, str, bytes]]:
    """Mode, kind, id and path of all entries, as they come: a few small trees that name each other can stand for any number."""
    with _running(repository, "ls-tree", "-r", "-z", "--full-tree", commit) as process:
        assert process.stdout is not None
        rest = b""
        while piece := process.stdout.read1(_PIECE):  # type: ignore[attr-defined]
            *entries, rest = (rest + piece).split(b"\0")
            for entry in entries:
                facts, _, name = entry.partition(b"\t")
                mode, kind, identifier = facts.split()
                yield int(mode, 8), kind, identifier.decode(), name
            if len(rest) > _ENTRY_LIMIT:
                raise damaged("a path is too long")
        if rest or process.wait() != 0:
            raise DSecError(f"source: git does not list the commit {commit} whole", field="source", cause="tool-failed", ran="ran")


@contextlib.contextmanager
def _running(repository: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in {**os.environ, **_environment()}.items() if value is not None}
    process = subprocess.Popen(
        leashed(_git(repository, *arguments)),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


@contextlib.contextmanager
def _objects(repository: Path) -> Iterator[Callable[..., tuple[int, Iterator[bytes]]]]:
    """A reader of objects by id and kind, at most so long, through one git for all; it gives their length and their bytes."""
    with _running(repository, "cat-file", "--batch") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        source, sink = process.stdout, process.stdin

        def read(identifier: str, kind: bytes, limit: int | None = None) -> tuple[int, Iterator[bytes]]:
            return _read_object(source, sink, identifier, kind, limit)

        yield read


def _read_object(source: IO[bytes], sink: IO[bytes], identifier: str, kind: bytes, limit: int | None) -> tuple[int, Iterator[bytes]]:
    sink.write(identifier.encode() + b"\n")
    sink.flush()
    header = source.readline().split()
    if len(header) != 3 or header[1] != kind:
        said = b" ".join(header).decode(errors="replace")
        raise DSecError(f"source: git does not give {identifier}: {said:.200}", field="source", cause="tool-failed", ran="ran")
    left = int(header[2])
    if limit is not None and left > limit:
        raise damaged(f"{identifier} has {left} bytes: too many for a link's target or a commit's head")
    return left, _pieces(source, left, identifier)


def _pieces(source: IO[bytes], left: int, identifier: str) -> Iterator[bytes]:
    while left:
        piece = source.read(min(left, _PIECE))
        if not piece:
            raise DSecError(f"source: git ended in the object {identifier}", field="source", cause="tool-failed", ran="ran")
        left -= len(piece)
        yield piece
    source.read(1)
