"""What of an agent's work reaches the verifier: its changes to the package's Python files, and nothing else.

The sandbox's files are hostile: the agent may have left links, pipes, huge files, or a process that swaps them while they are read. So
only regular files are read, each read is bounded in size and time, what was read is what is carried (nothing is copied by name later),
and everything else stays behind.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from libdsec import Conflict, Denied, InvalidArgument, NotFound
from libdsec.schema import FileStat

__all__ = ["Changes", "Limits", "SandboxFiles", "Unacceptable", "collect"]

# What the file service answers where the tree is not as it was: no fault of the sandbox, or an agent could turn a zero into a failure.
_AGENTS_DOING = (Conflict, Denied, InvalidArgument, NotFound)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_SOURCE = frozenset({"conftest", "sitecustomize", "usercustomize", "setup", "tests", "test"})


class SandboxFiles(Protocol):
    """The part of the SDK's file access that is needed here."""

    async def list(self, path: str, *, recursive: bool = False) -> list[FileStat]: ...

    def stream(self, path: str) -> AsyncIterator[bytes]: ...


class Unacceptable(Exception):
    """The tree is not one that honest work leaves. The rollout earns nothing; it is not a failure of the sandbox."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is looked at and carried."""

    entries: int = 2000
    changed_files: int = 64
    file_bytes: int = 256 * 1024
    total_bytes: int = 1024 * 1024
    read_seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Changes:
    """Files by path relative to the source folder: those written (new or changed) and those removed."""

    written: dict[str, bytes] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    """New things that are not carried, with the reason each."""


async def collect(files: SandboxFiles, folder: str, pristine: Mapping[str, bytes], limits: Limits | None = None) -> Changes:
    """Compare the sandbox's `folder` with the `pristine` Python files (path relative to it: content).

    Raises `Unacceptable` where a file of the package is no longer a regular file, or a bound is passed.
    """
    limits = limits or Limits()
    try:
        async with asyncio.timeout(limits.read_seconds):
            entries = await files.list(folder, recursive=True)
    except TimeoutError:
        raise Unacceptable(f"{folder} cannot be listed within {limits.read_seconds:g} s") from None
    except _AGENTS_DOING as error:
        raise Unacceptable(f"{folder} cannot be listed: {error.message}") from None
    if len(entries) > limits.entries:
        raise Unacceptable(f"{folder} holds {len(entries)} entries, more than {limits.entries}")
    found, left_behind = _sort_out(folder, entries, pristine, limits)
    written: dict[str, bytes] = {}
    for name, stat in sorted(found.items()):
        content = await _read(files, f"{folder}/{name}", stat, limits)
        if content != pristine.get(name):
            written[name] = content
    if len(written) > limits.changed_files:
        raise Unacceptable(f"{len(written)} files are changed, more than {limits.changed_files}")
    if sum(map(len, written.values())) > limits.total_bytes:
        raise Unacceptable(f"the changed files are larger than {limits.total_bytes} bytes together")
    return Changes(written, tuple(sorted(pristine.keys() - found.keys())), tuple(left_behind))


def _sort_out(folder: str, entries: list[FileStat], pristine: Mapping[str, bytes], limits: Limits) -> tuple[dict[str, FileStat], list[str]]:
    """The regular Python files to read, and what stays behind."""
    found: dict[str, FileStat] = {}
    left_behind: list[str] = []
    linked: list[str] = []
    for stat in entries:
        name = _relative(folder, stat.path)
        if stat.kind == "directory":
            continue
        if stat.kind != "file":
            if name in pristine or _is_source(name):
                raise Unacceptable(f"{name} is a {stat.kind}")
            linked.append(f"{name}: a {stat.kind}")
        elif name in pristine or _is_source(name):
            if stat.size > limits.file_bytes:
                raise Unacceptable(f"{name} is {stat.size} bytes large, more than {limits.file_bytes}")
            found[name] = stat
        elif name.endswith(".py"):
            left_behind.append(f"{name}: not a name of a source file")
        # Other files (compiled caches, type stubs, data) are of no use to a fix and too many to tell of.
    return found, left_behind + linked


def _relative(folder: str, path: str) -> str:
    prefix = folder.rstrip("/") + "/"
    name = path.removeprefix(prefix) if path.startswith(prefix) else path
    if name.startswith("/") or ".." in name.split("/"):
        raise Unacceptable(f"{path!r} is not below {folder}")
    return name


def _is_source(name: str) -> bool:
    """Whether an agent may add a file of that name: a module with an importable path that no tool picks up by itself."""
    *packages, module = name.removesuffix(".py").split("/") if name.endswith(".py") else [""]
    parts = [*packages, module]
    if not all(_NAME.fullmatch(part) for part in parts):
        return False
    return not _NOT_SOURCE.intersection(parts) and not module.startswith("test_")


async def _read(files: SandboxFiles, path: str, stat: FileStat, limits: Limits) -> bytes:
    """The content, if it is still what was listed: a pipe put in its place would block for ever, a growing file would never end."""
    content = bytearray()
    pieces = files.stream(path)
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for piece in pieces:
                content += piece
                if len(content) > limits.file_bytes:
                    raise Unacceptable(f"{path} grew from {stat.size} to over {limits.file_bytes} bytes while it was read")
    except TimeoutError:
        raise Unacceptable(f"{path} cannot be read within {limits.read_seconds:g} s") from None
    except _AGENTS_DOING as error:
        raise Unacceptable(f"{path} cannot be read: {error.message}") from None
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()
    return bytes(content)
