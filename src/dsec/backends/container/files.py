"""File operations as one user: dsec.backends.protocol.FilesConversation. Descriptors of open files come by SCM_RIGHTS."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Literal

from dsec.backends.container import wire
from dsec.backends.container.conversation import RequestConversation
from dsec.backends.container.failures import error_from_fields
from dsec.backends.container.frames import Fields, FieldValue, MalformedFrame, encode_fields, encode_frame
from dsec.backends.protocol import OpenedFile
from libdsec.errors import DSecError, InvalidArgument, NotFound, OutcomeUnknown, SandboxFailed
from libdsec.schema import FileStat

__all__ = ["ContainerFiles"]

Opener = Callable[[str], Awaitable[RequestConversation]]
FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]

_KINDS: Final[dict[int, FileKind]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
PATH_MAX: Final = 4096


def _checked(path: str, field: str = "path") -> str:
    if not path.startswith("/"):
        raise InvalidArgument(f"{field} must be absolute, not {path!r:.100}", field=field)
    if "\0" in path:
        raise InvalidArgument(f"{field} holds a NUL byte", field=field)
    if len(path.encode("utf-8", "surrogateescape")) >= PATH_MAX:
        raise InvalidArgument(f"{field} is longer than {PATH_MAX - 1} bytes", field=field)
    return path


def _file_stat(fields: Fields, path: str) -> FileStat:
    kind = _KINDS.get(stat.S_IFMT(fields.number(wire.T_KIND)))
    if kind is None:
        raise MalformedFrame(f"{path}: file kind {fields.number(wire.T_KIND):o} is not one")
    return FileStat(
        path=path,
        kind=kind,
        size=fields.number(wire.T_SIZE),
        mode=fields.number(wire.T_MODE) & 0o7777,
        uid=fields.number(wire.T_UID),
        gid=fields.number(wire.T_GID),
        mtime=fields.number(wire.T_MTIME_NS) / 1e9,
        inode=fields.number(wire.T_INODE),
        nlink=fields.number(wire.T_NLINK, 1),
        target=fields.text(wire.T_TARGET) if wire.T_TARGET in fields else None,
    )


class ContainerFiles:
    """One conversation, one operation at a time. A failed operation that made chronus hang up is followed by a fresh conversation."""

    def __init__(self, opener: Opener, user: str, conversation: RequestConversation) -> None:
        self._opener = opener
        self._user = user
        self._conversation = conversation
        self._lock = asyncio.Lock()
        self._unread_list = False
        self._watches: set[RequestConversation] = set()
        self._closed = False

    @classmethod
    async def open(cls, opener: Opener, user: str) -> ContainerFiles:
        """Raises NotFound for a user that the sandbox does not have."""
        return cls(opener, user, await opener(user))

    async def _send(self, operation: int, fields: list[tuple[int, FieldValue]]) -> RequestConversation:
        if self._conversation.closed and not self._closed:
            self._conversation = await self._opener(self._user)
            self._unread_list = False
        while self._unread_list:
            self._unread_list = bool((await self._reply()).number(wire.T_MORE))
        self._conversation.send(encode_frame(wire.FILE, encode_fields([(wire.T_FILE_OP, operation), *fields])))
        return self._conversation

    async def _reply(self) -> Fields:
        kind, _, payload, _ = await self._conversation.next()
        if kind != wire.FILE_REPLY:
            raise MalformedFrame(f"chronus answered FILE with kind {kind}")
        fields = Fields(payload)
        if wire.T_CODE in fields:
            raise error_from_fields(fields)
        return fields

    async def _call(self, operation: int, *fields: tuple[int, FieldValue]) -> Fields:
        async with self._lock:
            await self._send(operation, list(fields))
            return await self._answer()

    async def _answer(self) -> Fields:
        try:
            return await self._reply()
        except asyncio.CancelledError:
            # The answer would be taken for the next operation's.
            self._conversation.close()
            raise

    async def stat(self, path: str, *, follow: bool = False) -> FileStat:
        flags = wire.FLAG_FOLLOW if follow else 0
        return _file_stat(await self._call(wire.FILE_STAT, (wire.T_PATH, _checked(path)), (wire.T_FLAGS, flags)), path)

    async def list(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileStat]:
        """Entries as they come, unsorted. Leaving the loop early is fine; other operations wait until the listing is left."""
        _checked(path)
        flags = wire.FLAG_RECURSIVE if recursive else 0
        async with self._lock:
            await self._send(wire.FILE_LIST, [(wire.T_PATH, path), (wire.T_FLAGS, flags)])
            self._unread_list = True
            try:
                while self._unread_list:
                    reply = await self._reply()
                    self._unread_list = bool(reply.number(wire.T_MORE))
                    for raw in reply.all(wire.T_ENTRY):
                        entry = Fields(raw)
                        name = entry.text(wire.T_PATH)
                        yield _file_stat(entry, name if name.startswith("/") else f"{path.rstrip('/')}/{name}")
            except DSecError:
                self._unread_list = False
                raise
            except asyncio.CancelledError:
                self._conversation.close()
                raise

    async def _opened(self, path: str, operation: int, *fields: tuple[int, FieldValue]) -> OpenedFile:
        async with self._lock:
            conversation = await self._send(operation, [(wire.T_PATH, _checked(path)), *fields])
            reply = await self._answer()
            fd = conversation.take_fd()
        if fd is None:
            raise MalformedFrame(f"{path}: chronus opened it but sent no descriptor")
        try:
            status = os.fstat(fd)
            shown = FileStat(
                path=path,
                kind="file",
                size=status.st_size,
                mode=stat.S_IMODE(status.st_mode),
                uid=reply.number(wire.T_UID),
                gid=reply.number(wire.T_GID),
                mtime=status.st_mtime,
                inode=status.st_ino,
                nlink=status.st_nlink,
            )
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{path} is not a regular file", field="path")
        except BaseException:
            os.close(fd)
            raise
        return OpenedFile(fd=fd, stat=shown, token=reply.number(wire.T_TOKEN))

    async def open_read(self, path: str) -> OpenedFile:
        return await self._opened(path, wire.FILE_OPEN_READ)

    async def open_write(
        self, path: str, *, mode: int | None = None, uid: int | None = None, gid: int | None = None, parents: bool = False
    ) -> OpenedFile:
        fields: list[tuple[int, FieldValue]] = [(wire.T_FLAGS, wire.FLAG_PARENTS if parents else 0)]
        fields += [(tag, value) for tag, value in ((wire.T_MODE, mode), (wire.T_UID, uid), (wire.T_GID, gid)) if value is not None]
        return await self._opened(path, wire.FILE_OPEN_WRITE, *fields)

    async def commit(self, opened: OpenedFile, path: str) -> None:
        await self._call(wire.FILE_COMMIT, (wire.T_TOKEN, opened.token), (wire.T_PATH, _checked(path)), (wire.T_FLAGS, wire.FLAG_OVERWRITE))

    async def abort(self, opened: OpenedFile) -> None:
        await self._call(wire.FILE_ABORT, (wire.T_TOKEN, opened.token))

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        flags = wire.FLAG_PARENTS if parents else 0
        await self._call(wire.FILE_MKDIR, (wire.T_PATH, _checked(path)), (wire.T_MODE, mode), (wire.T_FLAGS, flags))

    async def move(self, path: str, target: str, *, overwrite: bool = False) -> None:
        flags = wire.FLAG_OVERWRITE if overwrite else 0
        fields = (wire.T_PATH, _checked(path)), (wire.T_TARGET, _checked(target, "target")), (wire.T_FLAGS, flags)
        try:
            await self._call(wire.FILE_MOVE, *fields)
        except NotFound as error:
            # Chronus says "path" of both. It looks at the path first: where that is there, the target's folder is not.
            if await self._is_there(path):
                error.field = "target"
            raise

    async def _is_there(self, path: str) -> bool:
        try:
            await self.stat(path)
        except DSecError:
            return False
        return True

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        flags = wire.FLAG_RECURSIVE if recursive else 0
        await self._call(wire.FILE_REMOVE, (wire.T_PATH, _checked(path)), (wire.T_FLAGS, flags))

    async def set_attributes(
        self, path: str, *, mode: int | None = None, uid: int | None = None, gid: int | None = None, mtime_ns: int | None = None
    ) -> None:
        given = ((wire.T_MODE, mode), (wire.T_UID, uid), (wire.T_GID, gid), (wire.T_MTIME_NS, mtime_ns))
        await self._call(wire.FILE_SET, (wire.T_PATH, _checked(path)), *((tag, value) for tag, value in given if value is not None))

    async def symlink(self, target: str, path: str) -> None:
        if not target or "\0" in target:
            raise InvalidArgument("target of a symlink must not be empty or hold a NUL byte", field="target")
        await self._call(wire.FILE_SYMLINK, (wire.T_TARGET, target), (wire.T_PATH, _checked(path)))

    async def watch(self, path: str) -> AsyncIterator[tuple[int, str]]:
        """Events on a conversation of its own, so that operations go on. Ends when this object is closed."""
        _checked(path)
        conversation = await self._opener(self._user)
        self._watches.add(conversation)
        try:
            conversation.send(encode_frame(wire.WATCH, encode_fields([(wire.T_PATH, path)])))
            while True:
                try:
                    kind, _, payload, _ = await conversation.next(patient=True)
                except (OutcomeUnknown, SandboxFailed):
                    if self._closed:
                        return
                    raise
                if kind == wire.OK:
                    # The watch is in place.
                    continue
                fields = Fields(payload)
                if kind != wire.FILE_REPLY:
                    raise MalformedFrame(f"chronus answered WATCH with kind {kind}")
                if wire.T_CODE in fields:
                    raise error_from_fields(fields)
                yield fields.number(wire.T_WATCH_MASK), fields.text(wire.T_PATH)
        finally:
            self._watches.discard(conversation)
            conversation.close()

    async def aclose(self) -> None:
        self._closed = True
        self._conversation.close()
        for conversation in list(self._watches):
            conversation.close()
