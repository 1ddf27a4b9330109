"""Directory trees as tar streams, in bounded memory both ways.

Packing runs tarfile in a thread that hands its blocks over one at a time. Unpacking is our own: tarfile's filters refuse honest absolute
symlinks, and its plain extraction follows whatever link an earlier member left.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, BinaryIO, cast

from libdsec.errors import InvalidArgument
from libdsec.threads import PipeReader, PipeWriter, WriterGone, in_own_thread

__all__ = ["forget_members", "pack", "require_directory", "unpack"]

BLOCK_BYTES = 256 << 10


async def pack(root: str) -> AsyncGenerator[bytes, None]:
    """A tar stream of what is in directory `root`, names relative to it. Devices, pipes and sockets are left out; owners are not told.

    Each name of a file that has several is a file of its own.
    """
    pipe = PipeWriter()

    def work() -> None:
        try:
            with tarfile.open(fileobj=cast("Any", pipe), mode="w|", bufsize=BLOCK_BYTES, format=tarfile.PAX_FORMAT) as archive:
                _add_below(archive, root)
        except WriterGone:
            return
        finally:
            pipe.end()

    working = in_own_thread(work)
    async with aclosing(pipe.blocks()) as blocks:
        async for block in blocks:
            yield block
    await working


def require_directory(root: str) -> None:
    """InvalidArgument where there is nothing to pack."""
    if not os.path.isdir(root):
        raise InvalidArgument(f"{root} is not a directory of this machine", field="local")


def _add_below(archive: tarfile.TarFile, root: str) -> None:
    require_directory(root)
    for folder, directories, files in os.walk(root):
        directories.sort()
        for name in sorted([*directories, *files]):
            path = os.path.join(folder, name)
            archive.add(path, arcname=os.path.relpath(path, root), recursive=False, filter=_anonymous)
            forget_members(archive)


def forget_members(archive: tarfile.TarFile) -> None:
    """Drop what tarfile keeps of each member: a tree of a million files must not be kept.

    Without the inodes that it has seen it packs each name of a file with the content, and none as a hard link.
    """
    kept = cast("Any", archive)
    kept.members.clear()
    kept.inodes.clear()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if member.isfifo() or member.isdev() else member


def _seen(future: asyncio.Future[None]) -> None:
    # Looked at, so that asyncio does not report a failure that another one overtook.
    if not future.cancelled():
        future.exception()


async def unpack(pieces: AsyncIterator[bytes], root: str) -> None:
    """Write a tar stream's members below directory `root`, which is made, each step by descriptor and without following links."""
    pipe = PipeReader()

    def work() -> None:
        try:
            os.makedirs(root, exist_ok=True)
            with tarfile.open(fileobj=cast("Any", pipe), mode="r|", bufsize=BLOCK_BYTES, errors="surrogateescape") as archive:
                _extract(archive, root)
        except tarfile.TarError as error:
            raise InvalidArgument(f"the tree's stream is damaged: {error}", field="body") from error
        finally:
            pipe.stop()

    working = in_own_thread(work)
    working.add_done_callback(_seen)
    try:
        await pipe.feed(pieces)
    finally:
        # Ends soon in any case, since the pipe has. A failure of ours comes before the reader's, whose end of file it made.
        await asyncio.wait([working])
    await working


def _extract(archive: tarfile.TarFile, root: str) -> None:
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    directory_modes: list[tuple[list[str], int]] = []
    try:
        for member in archive:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if ".." in parts:
                raise InvalidArgument(f"a member is called {member.name!r:.200}", field="body")
            if parts:
                _extract_one(archive, member, parts, root_fd, directory_modes)
            forget_members(archive)
        for parts, mode in reversed(directory_modes):
            _below(root_fd, parts, partial(_chmod_directory, mode=mode))
    finally:
        os.close(root_fd)


def _extract_one(
    archive: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str], root_fd: int, modes: list[tuple[list[str], int]]
) -> None:
    # Set-user-id, set-group-id and sticky bits are not taken from a guest.
    mode = member.mode & 0o777
    if member.isdir():
        _below(root_fd, parts, _make_directory)
        modes.append((parts, mode))
    elif member.issym():
        _below(root_fd, parts, partial(_make_symlink, target=member.linkname))
    elif member.isreg():
        source = archive.extractfile(member)
        assert source is not None, "a regular member has data"
        _below(root_fd, parts, partial(_write_file, mode=mode, source=cast("BinaryIO", source), mtime=member.mtime))


def _below(root_fd: int, parts: list[str], act: Callable[[int, str], Any]) -> None:
    """Call `act` with the parent directory's descriptor and the last name; directories on the way are made, links refused."""
    fd = os.dup(root_fd)
    try:
        for part in parts[:-1]:
            _make_directory(fd, part)
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = deeper
        act(fd, parts[-1])
    finally:
        os.close(fd)


def _make_directory(fd: int, name: str) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise InvalidArgument(f"{name!r:.200} is there already and is no directory", field="body") from None


def _chmod_directory(fd: int, name: str, *, mode: int) -> None:
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    try:
        os.fchmod(directory, mode)
    finally:
        os.close(directory)


def _make_symlink(fd: int, name: str, *, target: str) -> None:
    _remove_file(fd, name)
    os.symlink(target, name, dir_fd=fd)


def _remove_file(fd: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        return


def _write_file(fd: int, name: str, *, mode: int, source: BinaryIO, mtime: float) -> None:
    _remove_file(fd, name)
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=fd)
    try:
        while piece := source.read(BLOCK_BYTES):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(target, rest) :]
        os.fchmod(target, mode)
        os.utime(target, (mtime, mtime))
    finally:
        os.close(target)
