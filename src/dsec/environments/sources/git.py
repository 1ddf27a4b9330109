"""The files of one commit, without the repository: its history may hold the answer to the task.

Blobs are read as they are stored. `git archive` and a checkout would obey attributes, filters and hooks, which a repository from
elsewhere can set to leave files out or to run commands.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from dsec.environments.sources.builder import TreeBuilder
from dsec.environments.tools import leashed, run_tool
from dsec.environments.trees import AddContent, Node
from libdsec.errors import DSecError, InvalidArgument

__all__ = ["export_commit"]

_PIECE: Final = 1 << 18
_ENVIRONMENT: Final = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}


def _git(repository: Path, *arguments: str) -> list[str]:
    """No transport at all: a partial clone would fetch what it lacks by whatever command its own configuration names."""
    return ["git", "-c", f"safe.directory={repository}", "-c", "protocol.allow=never", "-C", str(repository), *arguments]


def export_commit(
    repository: Path, revision: str, builder: TreeBuilder, add: AddContent, progress: Callable[[int], None]
) -> dict[str, str]:
    """Put the commit's files in `builder`, dated as it is, and return which commit it was. Submodules become empty folders."""
    try:
        commit = run_tool(
            _git(repository, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}"), environment=_ENVIRONMENT
        ).decode().strip()  # fmt: skip
    except DSecError as error:
        if error.cause != "tool-failed":
            raise
        raise InvalidArgument(f"source: {repository} has no commit {revision!r:.200}: {error.message}", field="source") from error
    seconds = int(run_tool(_git(repository, "log", "-1", "--format=%ct", commit), environment=_ENVIRONMENT))
    listing = run_tool(_git(repository, "ls-tree", "-r", "-z", "--full-tree", commit), environment=_ENVIRONMENT)
    entries = [entry for entry in listing.split(b"\0") if entry]
    mtime = seconds * 1_000_000_000
    builder.put(b"", Node(stat.S_IFDIR | 0o755, mtime_ns=mtime, children={}))
    done = 0
    with _blobs(repository) as read:
        for entry in entries:
            facts, _, raw_name = entry.partition(b"\t")
            mode, kind, identifier = facts.decode().split()
            if kind == "commit":
                node = Node(stat.S_IFDIR | 0o755, mtime_ns=mtime, children={})
            elif stat.S_ISLNK(int(mode, 8)):
                node = Node(stat.S_IFLNK | 0o777, mtime_ns=mtime, target=b"".join(read(identifier)))
            else:
                size, inline, segments = add(read(identifier))
                executable = int(mode, 8) & 0o100
                node = Node(stat.S_IFREG | (0o755 if executable else 0o644), mtime_ns=mtime, size=size, inline=inline, segments=segments)
            builder.put(raw_name, node)
            done += node.size
            progress(done)
    return {"commit": commit}


@contextlib.contextmanager
def _blobs(repository: Path) -> Iterator[Callable[[str], Iterator[bytes]]]:
    """A reader of blobs by id, through one git for all."""
    process = subprocess.Popen(
        leashed(_git(repository, "cat-file", "--batch")),
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    source, sink = process.stdout, process.stdin
    try:
        yield lambda identifier: _read_blob(source, sink, identifier)
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            sink.close()
        source.close()
        process.wait()


def _read_blob(source: IO[bytes], sink: IO[bytes], identifier: str) -> Iterator[bytes]:
    sink.write(identifier.encode() + b"\n")
    sink.flush()
    header = source.readline().split()
    if len(header) != 3 or header[1] != b"blob":
        raise DSecError(f"source: git does not give the blob {identifier}: {b' '.join(header).decode()}", cause="tool-failed", ran="ran")
    left = int(header[2])
    while left:
        piece = source.read(min(left, _PIECE))
        if not piece:
            raise DSecError(f"source: git ended in the blob {identifier}", cause="tool-failed", ran="ran")
        left -= len(piece)
        yield piece
    source.read(1)
