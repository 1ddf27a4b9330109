"""Files: bodies streamed both ways, and what one does with names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec
from litestar import delete, get, post, put, websocket
from litestar.params import FromPath, FromQuery, HeaderParameter

from dsec.apiserver.channels import Gone, WireSocket, accept, close_with, receive, run_until_first, send
from dsec.apiserver.document import OCTETS, BytesIn, bytes_out
from dsec.apiserver.filedata import read_pieces, write_pieces
from dsec.apiserver.paths import GuestPath, GuestUser, Mode, Owner, conversation, parse_mode, parse_mtime, parse_owner, raw_query, sendable
from dsec.apiserver.ranges import parse_range
from dsec.apiserver.state import edge_of
from dsec.apiserver.wire import StreamAnswer, WireRequest, body_pieces
from dsec.backends.protocol import FilesConversation
from libdsec.errors import QuotaExceeded
from libdsec.schema import FileStat

__all__ = ["ROUTES"]

_AT = "/v1/sandboxes/{sandbox_id:str}/files"
LIST_MOST = 1_000_000
Flag = FromQuery[bool]


@get(_AT, tags=["files"], responses={200: bytes_out(OCTETS, "The whole file"), 206: bytes_out(OCTETS, "The range of it asked for")})
async def read_file(
    request: WireRequest,
    sandbox_id: FromPath[str],
    path: GuestPath,
    user: GuestUser = None,
    content_range: Annotated[str | None, HeaderParameter(name="Range")] = None,
) -> StreamAnswer:
    """The file's bytes, or the range asked for (206). One that begins behind the end, or is no range of bytes, is refused; several ranges
    and other units are answered with the whole."""
    path = raw_query(request, "path", path)
    talk = await edge_of(request).files(sandbox_id, user or "")
    try:
        opened = await talk.open_read(path)
    except BaseException:
        await talk.aclose()
        raise
    try:
        size: int | None = opened.stat.size
        # Files of /proc and /sys say 0, or a page, whatever they hold.
        if size == 0 or path.startswith(("/proc/", "/sys/")):
            size = None
        span = parse_range(content_range, size) if size is not None else None
        headers = [(b"accept-ranges", b"bytes"), (b"x-dsec-mode", b"%04o" % opened.stat.mode)]
        if span is not None:
            headers.append((b"content-range", b"bytes %d-%d/%d" % (span[0], span[1] - 1, size or 0)))
        start, end = span or (0, size)
    except BaseException:
        os.close(opened.fd)
        await talk.aclose()
        raise
    return StreamAnswer(
        200 if span is None else 206, _sent(talk, opened.fd, start, end), length=None if end is None else end - start, headers=headers
    )


async def _sent(talk: FilesConversation, fd: int, start: int, end: int | None) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(read_pieces(fd, start, end)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        os.close(fd)
        # Open until now, since a conversation is what tells the edge that the sandbox is not idle.
        await talk.aclose()


@put(_AT, tags=["files"], operation_class=BytesIn)
async def write_file(
    request: WireRequest,
    sandbox_id: FromPath[str],
    path: GuestPath,
    user: GuestUser = None,
    mode: Mode = None,
    owner: Owner = None,
    parents: Flag = False,
) -> FileStat:
    """Write the body to a temporary file beside `path`, then rename it. A body cut off leaves nothing, and the old file as it was."""
    path = raw_query(request, "path", path)
    bits = parse_mode(mode)
    uid, gid = parse_owner(owner)
    async with conversation(request, sandbox_id, user) as talk:
        opened = await talk.open_write(path, mode=bits, uid=uid, gid=gid, parents=parents)
        try:
            await write_pieces(opened.fd, body_pieces(request))
        except BaseException:
            await asyncio.shield(talk.abort(opened))
            raise
        finally:
            os.close(opened.fd)
        await talk.commit(opened, path)
        return sendable(await talk.stat(path))


@delete(_AT, tags=["files"], status_code=204)
async def remove_file(
    request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, user: GuestUser = None, recursive: Flag = False
) -> None:
    """Remove a file, an empty directory or, with `recursive`, a tree. Symlinks are removed, not followed."""
    async with conversation(request, sandbox_id, user) as talk:
        await talk.remove(raw_query(request, "path", path), recursive=recursive)


@get(_AT + "/stat", tags=["files"])
async def stat_file(
    request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, user: GuestUser = None, follow: Flag = False
) -> FileStat:
    """What lstat says; with `follow`, stat."""
    async with conversation(request, sandbox_id, user) as talk:
        return sendable(await talk.stat(raw_query(request, "path", path), follow=follow))


@get(_AT + "/list", tags=["files"])
async def list_files(
    request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, user: GuestUser = None, recursive: Flag = False
) -> list[FileStat]:
    """The entries of a directory, sorted by path; of all below it with `recursive`."""
    entries: list[FileStat] = []
    async with conversation(request, sandbox_id, user) as talk:
        async for entry in talk.list(raw_query(request, "path", path), recursive=recursive):
            entries.append(sendable(entry))
            if len(entries) > LIST_MOST:
                raise QuotaExceeded(f"more than {LIST_MOST} entries", field="path", cause="entries")
    entries.sort(key=lambda each: each.path)
    return entries


@post(_AT + "/mkdir", tags=["files"], status_code=204)
async def make_directory(
    request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, user: GuestUser = None, mode: Mode = None, parents: Flag = False
) -> None:
    """Make a directory; with `parents`, those above it too, and one that is there is no error."""
    bits = parse_mode(mode)
    async with conversation(request, sandbox_id, user) as talk:
        await talk.mkdir(raw_query(request, "path", path), mode=0o755 if bits is None else bits, parents=parents)


@post(_AT + "/move", tags=["files"], status_code=204)
async def move_file(
    request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, target: GuestPath, user: GuestUser = None, overwrite: Flag = False
) -> None:
    """Rename `path` to `target`."""
    async with conversation(request, sandbox_id, user) as talk:
        await talk.move(raw_query(request, "path", path), raw_query(request, "target", target), overwrite=overwrite)


@post(_AT + "/symlink", tags=["files"], status_code=204)
async def make_symlink(
    request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, target: FromQuery[str], user: GuestUser = None
) -> None:
    """Make a symlink at `path` that says `target`, whatever that is."""
    async with conversation(request, sandbox_id, user) as talk:
        await talk.symlink(target, raw_query(request, "path", path))


@post(_AT + "/attributes", tags=["files"], status_code=204)
async def set_attributes(
    request: WireRequest,
    sandbox_id: FromPath[str],
    path: GuestPath,
    user: GuestUser = None,
    mode: Mode = None,
    owner: Owner = None,
    mtime: FromQuery[float | None] = None,
) -> None:
    """Change what is given of mode, owner and time of modification (Unix seconds)."""
    bits = parse_mode(mode)
    uid, gid = parse_owner(owner)
    mtime_ns = parse_mtime(mtime)
    async with conversation(request, sandbox_id, user) as talk:
        await talk.set_attributes(raw_query(request, "path", path), mode=bits, uid=uid, gid=gid, mtime_ns=mtime_ns)


@websocket(_AT + "/watch")
async def watch_files(socket: WireSocket, sandbox_id: FromPath[str], path: GuestPath, user: GuestUser = None) -> None:
    """Each message is MessagePack `[inotify mask, name]`."""
    try:
        await accept(socket)
        try:
            async with conversation(socket, sandbox_id, user) as talk:

                async def forward() -> None:
                    async for mask, name in talk.watch(raw_query(socket, "path", path)):
                        await send(socket, msgspec.msgpack.encode((mask, name.encode(errors="surrogateescape"))))

                async def until_gone() -> None:
                    while True:
                        await receive(socket)

                await run_until_first(forward(), until_gone())
        except Gone:
            return
        except Exception as error:
            await close_with(socket, error)
            return
        await close_with(socket)
    except Gone:
        return


ROUTES = [
    read_file,
    write_file,
    remove_file,
    stat_file,
    list_files,
    make_directory,
    move_file,
    make_symlink,
    set_attributes,
    watch_files,
]
