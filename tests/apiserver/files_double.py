"""Files of the edge double: the contract of FilesConversation over a folder of the test."""

# ruff: noqa: ASYNC240  (a double's few file calls may block)

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import stat as stat_module
from collections.abc import AsyncIterator
from pathlib import Path

from dsec.backends.protocol import OpenedFile
from libdsec.errors import Conflict, InvalidArgument, NotFound
from libdsec.schema import FileStat

_KINDS = {stat_module.S_IFREG: "file", stat_module.S_IFDIR: "directory", stat_module.S_IFLNK: "symlink", stat_module.S_IFIFO: "fifo"}


class FilesDouble:
    opened = 0

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tokens: dict[int, str] = {}
        self.counter = itertools.count(1)
        self.events: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        FilesDouble.opened += 1

    def _host(self, path: str) -> str:
        return str(self.root) + path

    @contextlib.contextmanager
    def _typed(self, path: str):
        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"{path} is not there", field="path") from None
        except FileExistsError:
            raise Conflict(f"{path} exists", field="path", cause="exists") from None
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", field="path", cause=errno.errorcode[error.errno]) from None

    def _stat(self, path: str, status: os.stat_result) -> FileStat:
        kind = _KINDS[stat_module.S_IFMT(status.st_mode)]
        return FileStat(
            path=path,
            kind=kind,
            size=status.st_size,
            mode=stat_module.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime=status.st_mtime,
            inode=status.st_ino,
            nlink=status.st_nlink,
            target=os.readlink(self._host(path)) if kind == "symlink" else None,
        )

    async def stat(self, path: str, *, follow: bool = False) -> FileStat:
        with self._typed(path):
            return self._stat(path, os.stat(self._host(path), follow_symlinks=follow))

    async def list(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileStat]:
        with self._typed(path):
            entries = list(os.scandir(self._host(path)))
        for entry in entries:
            inner = f"{path.rstrip('/')}/{entry.name}"
            yield self._stat(inner, entry.stat(follow_symlinks=False))
            if recursive and entry.is_dir(follow_symlinks=False):
                async for deeper in self.list(inner, recursive=True):
                    yield deeper

    async def open_read(self, path: str) -> OpenedFile:
        with self._typed(path):
            fd = os.open(self._host(path), os.O_RDONLY | os.O_NOFOLLOW)
        if not stat_module.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidArgument(f"{path} is not a regular file", field="path")
        return OpenedFile(fd=fd, stat=self._stat(path, os.fstat(fd)))

    async def open_write(self, path: str, *, mode=None, uid=None, gid=None, parents: bool = False) -> OpenedFile:
        token = next(self.counter)
        temporary = f"{Path(self._host(path)).parent}/.tmp-{id(self)}-{token}"
        with self._typed(path):
            if parents:
                Path(temporary).parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if mode is None else mode)
            os.fchmod(fd, 0o644 if mode is None else mode)
            if uid is not None:
                os.fchown(fd, uid, -1 if gid is None else gid)
        self.tokens[token] = temporary
        return OpenedFile(fd=fd, stat=self._stat(path, os.fstat(fd)), token=token)

    async def commit(self, opened: OpenedFile, path: str) -> None:
        with self._typed(path):
            os.rename(self.tokens.pop(opened.token), self._host(path))

    async def abort(self, opened: OpenedFile) -> None:
        os.unlink(self.tokens.pop(opened.token))

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        with self._typed(path):
            Path(self._host(path)).mkdir(mode, parents=parents, exist_ok=parents)

    async def move(self, path: str, target: str, *, overwrite: bool = False) -> None:
        if not overwrite and os.path.lexists(self._host(target)):
            raise Conflict(f"{target} exists", field="target", cause="exists")
        with self._typed(path):
            os.rename(self._host(path), self._host(target))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        host = self._host(path)
        with self._typed(path):
            if os.path.isdir(host) and not os.path.islink(host):
                if recursive:
                    shutil.rmtree(host)
                else:
                    os.rmdir(host)
            else:
                os.unlink(host)

    async def set_attributes(self, path: str, *, mode=None, uid=None, gid=None, mtime_ns=None) -> None:
        host = self._host(path)
        with self._typed(path):
            if mode is not None:
                os.chmod(host, mode)
            if uid is not None or gid is not None:
                os.lchown(host, -1 if uid is None else uid, -1 if gid is None else gid)
            if mtime_ns is not None:
                os.utime(host, ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    async def symlink(self, target: str, path: str) -> None:
        with self._typed(path):
            os.symlink(target, self._host(path))

    async def watch(self, path: str) -> AsyncIterator[tuple[int, str]]:
        await self.stat(path)
        seen = set(os.listdir(self._host(path)))
        while True:
            await asyncio.sleep(0.005)
            now = set(os.listdir(self._host(path)))
            for name in sorted(now - seen):
                yield 0x100, name
            seen = now

    async def aclose(self) -> None:
        for temporary in self.tokens.values():
            os.unlink(temporary)
        self.tokens.clear()
        FilesDouble.opened -= 1
