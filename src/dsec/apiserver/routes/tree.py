"""Directory trees as tar streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tarfile
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import IO, Any, TypeVar, cast

from litestar import get, put
from litestar.params import FromPath

from dsec.apiserver.document import TAR, TarIn, bytes_out
from dsec.apiserver.filedata import read_pieces, write_all, write_failure
from dsec.apiserver.paths import GuestPath, GuestUser, conversation, raw_query
from dsec.apiserver.state import edge_of
from dsec.apiserver.wire import StreamAnswer, WireRequest, body_pieces
from dsec.backends.protocol import FilesConversation
from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound
from libdsec.schema import FileStat
from libdsec.threads import PipeReader, in_own_thread
from libdsec.trees import forget_members

__all__ = ["ROUTES"]

_AT = "/v1/sandboxes/{sandbox_id:str}/files/tree"
T = TypeVar("T")
BLOCK_BYTES = 256 << 10
HEADER_MOST = 1 << 20
"""Of a member's extended header: longer ones would be taken into memory whole."""
LINKABLE_MOST = 1 << 20
"""Files of one archive that its hard links may name: what is remembered of them is all that grows with an archive."""
_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}


@get(_AT, tags=["files"], responses={200: bytes_out(TAR, "The tar stream")})
async def read_tree(request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, user: GuestUser = None) -> StreamAnswer:
    """A tar stream of all below a directory, names relative to it. Devices, pipes and sockets are left out."""
    path = raw_query(request, "path", path)
    talk = await edge_of(request).files(sandbox_id, user or "")
    return StreamAnswer(200, _tar(talk, path), length=None, headers=[], media_type=TAR.encode())


async def _tar(talk: FilesConversation, root: str) -> AsyncGenerator[bytes, None]:
    try:
        if (await talk.stat(root, follow=True)).kind != "directory":
            raise InvalidArgument(f"{root} is not a directory", field="path")
        prefix = root.rstrip("/") + "/"
        folders = [root]
        # One folder's entries at a time: the conversation does nothing else while it lists, and a whole tree's would have no bound.
        while folders:
            entries = [entry async for entry in talk.list(folders.pop())]
            for entry in entries:
                if not entry.path.startswith(prefix):
                    raise DSecError(f"the listing of {root} names {entry.path!r:.200}", cause="listing")
                async for block in _member(talk, entry, entry.path[len(prefix) :]):
                    yield block
                if entry.kind == "directory":
                    folders.append(entry.path)
        yield bytes(2 * tarfile.BLOCKSIZE)
    finally:
        await talk.aclose()


async def _member(talk: FilesConversation, entry: FileStat, name: str) -> AsyncGenerator[bytes, None]:
    kind = _TYPES.get(entry.kind)
    if kind is None:
        return
    header = tarfile.TarInfo(name)
    header.type = kind
    header.mode, header.uid, header.gid, header.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    header.linkname = entry.target or ""
    if entry.kind != "file":
        yield header.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
        return
    try:
        opened = await talk.open_read(entry.path)
    except (NotFound, InvalidArgument):
        # Gone, or become something else, since it was listed.
        return
    try:
        header.size = opened.stat.size
        yield header.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
        async with aclosing(read_pieces(opened.fd, 0, header.size)) as pieces:
            async for piece in pieces:
                yield piece
        yield bytes(-header.size % tarfile.BLOCKSIZE)
    finally:
        os.close(opened.fd)


@put(_AT, tags=["files"], status_code=204, operation_class=TarIn)
async def write_tree(request: WireRequest, sandbox_id: FromPath[str], path: GuestPath, user: GuestUser = None) -> None:
    """Unpack a tar stream into a directory, made if it is not there.

    Each file is replaced whole and gets the time of modification that the archive says; symlinks are written, never followed outside. A
    hard link must name a file that came before it in the archive, and becomes a file of its own with the same content.
    """
    path = raw_query(request, "path", path)
    async with conversation(request, sandbox_id, user) as talk:
        pipe = _BoundedReader()
        working = in_own_thread(_Unpacking(talk, path, pipe).run)
        try:
            await pipe.feed(body_pieces(request))
        finally:
            await asyncio.wait([working])
            failure = working.exception()
        if failure is not None:
            raise failure


class _BoundedReader(PipeReader):
    """Refuses to gather more than a header may have: file data is read in blocks far smaller."""

    def read(self, size: int) -> bytes:
        if size > HEADER_MOST + BLOCK_BYTES:
            raise InvalidArgument(f"a header of the archive has {size} bytes", field="body")
        return super().read(size)


class _Unpacking:
    """The thread's side: tarfile reads, the loop's conversation writes."""

    def __init__(self, talk: FilesConversation, root: str, pipe: PipeReader) -> None:
        self._talk = talk
        self._root = root.rstrip("/")
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._begun = False
        self._linkable: set[int] = set()
        """Hashes of the paths of the archive's files. Whether one is still a file is asked of the sandbox."""

    def run(self) -> None:
        try:
            self._unpack()
        except DSecError as error:
            if self._begun and error.ran == "not-run":
                # True of the step that failed; those before it stay.
                error.ran = "ran"
            raise
        finally:
            self._pipe.stop()

    def _unpack(self) -> None:
        try:
            with tarfile.open(fileobj=cast("Any", self._pipe), mode="r|", bufsize=BLOCK_BYTES, errors="surrogateescape") as archive:
                for member in archive:
                    self._add(archive, member)
                    forget_members(archive)
        except tarfile.TarError as error:
            raise InvalidArgument(f"the body is no complete tar archive: {error}", field="body") from error
        self._begin()

    def _begin(self) -> None:
        if not self._begun:
            self._do(self._talk.mkdir(self._root or "/", parents=True))
            self._begun = True

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = self._path_of(member.name)
        if path == self._root:
            return
        if member.isdir():
            self._begin()
            self._do(self._talk.mkdir(path, mode=member.mode & 0o7777, parents=True))
        elif member.issym():
            self._begin()
            self._do(self._symlink(member.linkname, path))
        elif member.islnk():
            self._copy(member.linkname, path)
        elif member.isreg():
            source = archive.extractfile(member)
            assert source is not None, "a regular member has data"
            self._write(source, path, member.mode & 0o7777, member.mtime)

    def _path_of(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise InvalidArgument(f"the archive names {name!r:.200}", field="body")
        return "/".join((self._root, *parts))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _symlink(self, target: str, path: str) -> None:
        try:
            await self._talk.symlink(target, path)
        except Conflict:
            await self._talk.remove(path)
            await self._talk.symlink(target, path)

    def _copy(self, target: str, path: str) -> None:
        """A hard link, as a copy: files here are replaced one by one, and two names of one file would soon differ anyhow."""
        source = self._path_of(target)
        if hash(source) not in self._linkable or not self._do(self._is_plain(source)):
            raise InvalidArgument(f"the archive links {path!r:.200} to {target!r:.200}, which is no file in it before that", field="body")
        opened = self._do(self._talk.open_read(source))
        with os.fdopen(opened.fd, "rb", buffering=0) as content:
            self._write(content, path, opened.stat.mode, opened.stat.mtime)

    async def _is_plain(self, path: str) -> bool:
        """Whether `path` is a file, and no symlink on the way from the root of the tree leads to it elsewhere."""
        names = path[len(self._root) + 1 :].split("/")
        for count in range(1, len(names)):
            if (await self._talk.stat("/".join((self._root, *names[:count])))).kind != "directory":
                return False
        return (await self._talk.stat(path)).kind == "file"

    def _write(self, source: IO[bytes], path: str, mode: int, mtime: float) -> None:
        self._begin()
        opened = self._do(self._talk.open_write(path, mode=mode, parents=True))
        try:
            while piece := source.read(BLOCK_BYTES):
                write_all(opened.fd, [piece])
            _set_time(opened.fd, mtime)
        except BaseException as error:
            self._do(self._talk.abort(opened))
            raise write_failure(error) if isinstance(error, OSError) else error from error
        finally:
            os.close(opened.fd)
        self._do(self._talk.commit(opened, path))
        if len(self._linkable) < LINKABLE_MOST:
            self._linkable.add(hash(path))


def _set_time(fd: int, seconds: float) -> None:
    # An archive may say what is no number, or no time that a file can have: then it keeps the time at which it was written.
    with contextlib.suppress(ValueError, OverflowError):
        mtime_ns = round(seconds * 1e9)
        os.utime(fd, ns=(mtime_ns, mtime_ns))


ROUTES = [read_tree, write_tree]
