"""A sandbox's files: bodies streamed both ways, names resolved inside the sandbox as the user asked for."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, BinaryIO

import msgspec

from libdsec import trees
from libdsec.api import Api, decode, decode_error, merged, with_query
from libdsec.errors import ConnectionFailed, DSecError, InvalidArgument, OutcomeUnknown
from libdsec.schema import FileStat
from libdsec.transport import Reply

__all__ = ["Files"]

UPLOAD_PIECE_BYTES = 256 << 10
_ACCEPT = {"Accept": "application/vnd.msgpack"}
_UPLOAD_HEADERS = {**_ACCEPT, "Content-Type": "application/octet-stream"}
Content = bytes | bytearray | memoryview | str | AsyncIterable[bytes] | BinaryIO


class Files:
    """`sandbox.files`. Paths are absolute. `user` on any call is whose rights hold, by default the sandbox's own user.

    A write replaces the file whole or not at all. Paths that are not UTF-8 are Python strings with surrogate escapes, as in `os`.
    """

    def __init__(self, api: Api, sandbox_path: str) -> None:
        self._api = api
        self._path = sandbox_path + "/files"

    async def read(self, path: str, *, start: int = 0, length: int | None = None, user: str | None = None) -> bytes:
        """The bytes of a file, or `length` of them from `start`. InvalidArgument where the file ends before `start`."""
        async with aclosing(self.stream(path, start=start, length=length, user=user)) as pieces:
            return merged([piece async for piece in pieces])

    async def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict", user: str | None = None) -> str:
        """A whole file as text."""
        return (await self.read(path, user=user)).decode(encoding, errors)

    async def stream(self, path: str, *, start: int = 0, length: int | None = None, user: str | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes piece by piece, for files of any size."""
        if start < 0:
            raise InvalidArgument(f"start must not be negative, not {start}", field="start")
        if length is not None and length <= 0:
            return
        headers = {} if length is None and not start else {"Range": f"bytes={start}-{'' if length is None else start + length - 1}"}
        async with aclosing(self._api.download(self._path, _query(path, user=user), headers)) as pieces:
            async for piece in pieces:
                yield piece

    async def write(
        self,
        path: str,
        data: Content,
        *,
        mode: int | None = None,
        owner: str | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> FileStat:
        """Write a file: bytes, text (UTF-8), an async iterator of bytes, or a binary file opened for reading.

        `mode` are permission bits (0o644 where none); `owner` is `uid` or `uid:gid` in numbers; `parents` makes missing directories.
        QuotaExceeded where the disk is full. After any failure the old file is intact and nothing else is left.
        """
        query = _query(path, user=user, mode=_octal(mode), owner=owner, parents=parents or None)
        return _restored(await self._put(self._path, query, _body(data), FileStat))

    async def _put(self, path: str, query: Mapping[str, Any], body: bytes | _Source, answer: Any) -> Any:
        try:
            return await self._sent(path, query, body, answer)
        except DSecError as error:
            if isinstance(body, _Source) and body.failure is not None:
                raise body.failure from error
            raise

    async def _sent(self, path: str, query: Mapping[str, Any], body: bytes | _Source, answer: Any) -> Any:
        try:
            async with self._api.transport.stream("PUT", with_query(path, query), body=body, headers=_UPLOAD_HEADERS) as reply:
                content = await reply.read()
                return decode(Reply(reply.status, content, reply.headers.get("Content-Type", "")), answer)
        except ConnectionFailed as error:
            if error.ran == "not-run":
                raise
            raise OutcomeUnknown(f"the upload was cut off: {error.message}", cause=error.cause) from error

    async def stat(self, path: str, *, follow: bool = False, user: str | None = None) -> FileStat:
        """What is at `path`; of a symlink itself, or with `follow` of what it points at."""
        query = _query(path, follow=follow or None, user=user)
        return _restored(await self._api.call("GET", self._path + "/stat", FileStat, query=query, idempotent=True))

    async def mkdir(self, path: str, *, mode: int | None = None, parents: bool = False, user: str | None = None) -> None:
        """Make a directory. With `parents` those above it too, and one that is there is no error."""
        await self._post("mkdir", _query(path, mode=_octal(mode), parents=parents or None, user=user))

    async def move(self, path: str, target: str, *, overwrite: bool = False, user: str | None = None) -> None:
        """Rename. Conflict where `target` exists, unless `overwrite`."""
        await self._post("move", _query(path, target=_raw(target, "target"), overwrite=overwrite or None, user=user))

    async def symlink(self, target: str, path: str, *, user: str | None = None) -> None:
        """Make a symlink at `path` that says `target`."""
        await self._post("symlink", _query(path, target=target, user=user))

    async def set_attributes(
        self, path: str, *, mode: int | None = None, owner: str | None = None, mtime: float | None = None, user: str | None = None
    ) -> None:
        """Change permission bits, owner (`uid` or `uid:gid`) and modification time (Unix seconds), those that are given."""
        await self._post("attributes", _query(path, mode=_octal(mode), owner=owner, mtime=mtime, user=user))

    async def _post(self, verb: str, query: Mapping[str, Any]) -> None:
        await self._api.call("POST", f"{self._path}/{verb}", type(None), query=query)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Remove a file, an empty directory or, with `recursive`, all below it too."""
        await self._api.call("DELETE", self._path, type(None), query=_query(path, recursive=recursive or None, user=user))

    async def upload(
        self, local: str | os.PathLike[str], path: str, *, mode: int | None = None, parents: bool = False, user: str | None = None
    ) -> FileStat:
        """Copy a file of this machine into the sandbox, with its permission bits unless `mode` is given."""
        with await asyncio.to_thread(open, local, "rb") as opened:
            bits = os.fstat(opened.fileno()).st_mode & 0o777 if mode is None else mode
            return await self.write(path, opened, mode=bits, parents=parents, user=user)

    async def download(self, path: str, local: str | os.PathLike[str], *, user: str | None = None) -> int:
        """Copy a file out to this machine; the count of bytes. It appears complete or not at all."""
        local = os.fspath(local)
        temporary = f"{local}.dsec-{os.getpid()}-{id(self):x}"
        total = 0
        try:
            with await asyncio.to_thread(open, temporary, "xb") as opened:
                async with aclosing(self.stream(path, user=user)) as pieces:
                    async for piece in pieces:
                        await asyncio.to_thread(opened.write, piece)
                        total += len(piece)
            os.replace(temporary, local)
        except BaseException:
            if os.path.exists(temporary):  # noqa: ASYNC240  (a local name, looked up once)
                os.unlink(temporary)
            raise
        return total

    async def upload_tree(self, local: str | os.PathLike[str], path: str, *, user: str | None = None) -> None:
        """Copy a directory's contents into directory `path` of the sandbox, which is made if it is not there. Symlinks stay symlinks.

        Files keep permission bits and times of modification. One that has several names arrives as several files. Devices, pipes and
        sockets are left out. Files replace those of the same name one by one; after a failure those before it are there.
        """
        local = os.fspath(local)
        await asyncio.to_thread(trees.require_directory, local)
        await self._put(self._path + "/tree", _query(path, user=user), _Source(trees.pack(local)), type(None))

    async def download_tree(self, path: str, local: str | os.PathLike[str], *, user: str | None = None) -> None:
        """Copy a directory's contents out into `local`, which is made if it is not there.

        What the sandbox says is not trusted: nothing is written outside `local`, no device or set-user-id file is made. Symlinks come as
        they are, wherever they point: treat them as data.
        """
        async with self._api.transport.stream("GET", with_query(self._path + "/tree", _query(path, user=user)), headers=_ACCEPT) as reply:
            if reply.status >= 400:
                raise decode_error(reply.status, await reply.read(), reply.headers.get("Content-Type", ""))
            await trees.unpack(reply.chunks(), os.fspath(local))

    async def watch(self, path: str, *, user: str | None = None) -> AsyncGenerator[tuple[int, str], None]:
        """`(inotify mask, name)` for what happens in directory `path`, until the caller stops iterating."""
        async with self._api.transport.websocket(with_query(self._path + "/watch", _query(path, user=user))) as socket:
            while (message := await socket.receive()) is not None:
                mask, name = msgspec.msgpack.decode(message, type=tuple[int, bytes])
                yield mask, os.fsdecode(name)

    async def list(self, path: str, *, recursive: bool = False, user: str | None = None) -> list[FileStat]:
        """The entries of a directory, sorted by path; of all below it with `recursive`."""
        query = _query(path, recursive=recursive or None, user=user)
        found = await self._api.call("GET", self._path + "/list", list[FileStat], query=query, idempotent=True)
        return [_restored(each) for each in found]


def _raw(path: str, field: str = "path") -> str | bytes:
    if "\0" in path:
        raise InvalidArgument(f"{field} holds a NUL byte", field=field)
    try:
        return path if path.isascii() else path.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} {path!r:.100} has surrogates that stand for no byte", field=field) from None


def _query(path: str, **others: Any) -> dict[str, Any]:
    return {"path": _raw(path), **others}


def _octal(mode: int | None) -> str | None:
    return None if mode is None else f"{mode:04o}"


def _restored(stat: FileStat) -> FileStat:
    if stat.raw_path is None:
        return stat
    target = None if stat.raw_target is None else os.fsdecode(stat.raw_target)
    return msgspec.structs.replace(stat, path=os.fsdecode(stat.raw_path), target=target, raw_path=None, raw_target=None)


class _Source:
    """What an upload is made of, piece by piece. Its own failure is kept: a transport tells it as a connection that broke."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        self._pieces = aiter(pieces)
        self.failure: Exception | None = None

    def __aiter__(self) -> _Source:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = await anext(self._pieces)
            if not isinstance(piece, bytes | bytearray | memoryview):
                raise InvalidArgument(f"data gives {type(piece).__name__}, not bytes", field="data")
        except StopAsyncIteration:
            raise
        except Exception as error:
            self.failure = error
            raise
        return piece


def _body(data: Content) -> bytes | _Source:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if isinstance(data, AsyncIterable):
        return _Source(data)
    if hasattr(data, "read") and not isinstance(data, io.TextIOBase):
        return _Source(_file_pieces(data))
    raise InvalidArgument(
        f"data must be bytes, text, an iterator of bytes (for an async call an async one) or a file opened in binary mode, "
        f"not {type(data).__name__}",
        field="data",
    )


async def _file_pieces(opened: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(opened.read, UPLOAD_PIECE_BYTES):
        yield piece
