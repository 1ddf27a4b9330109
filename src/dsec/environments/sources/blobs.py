"""The files of an image, in a folder or in a tar that is read where it lies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from dsec.environments.sources.archives import Budget
from dsec.environments.sources.bytestreams import Seekable
from dsec.environments.sources.refusals import damaged
from dsec.environments.sources.streams import Extent, decompressed
from dsec.environments.sources.tar import HARD_LINK, TarReader
from dsec.kernel.paths import open_in

__all__ = ["Blobs", "document", "opened_image"]

_DOCUMENT_LIMIT: Final = 16 << 20
_FILES_LIMIT: Final = 100_000
_LINKS_LIMIT: Final = 40
_DISK_SHARE: Final = 0.9
"""Of what the disk has left an image may take so much while it is read."""


class Blobs(Protocol):
    """Files by path below the image's folder."""

    def holds(self, name: str) -> bool:
        """Whether there is a file of this name."""
        ...

    def opened(self, name: str) -> contextlib.AbstractContextManager[Extent]:
        """The file's bytes. InvalidArgument if there is none."""
        ...


@contextlib.contextmanager
def opened_image(path: Path, work: Path, progress: Callable[[int, int], None]) -> Iterator[Blobs]:
    """The image at `path`. Only one in a tar that is compressed as a whole is written out, into the folder `work`."""
    if path.is_dir():
        root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _Folder(root)
        finally:
            os.close(root)
        return
    with path.open("rb", buffering=0) as file:
        with decompressed(Extent(file.fileno()), progress) as stream:
            if not stream.is_plain:
                budget = Budget(int(shutil.disk_usage(work).free * _DISK_SHARE))
                with (work / "image.tar").open("xb", buffering=0) as plain:
                    for chunk in stream:
                        budget.spend(len(chunk))
                        plain.write(chunk)
        if stream.is_plain:
            yield _Archive(file.fileno())
        else:
            with (work / "image.tar").open("rb", buffering=0) as plain_file:
                yield _Archive(plain_file.fileno())


class _Folder:
    def __init__(self, root: int) -> None:
        self._root = root

    def holds(self, name: str) -> bool:
        try:
            os.close(open_in(self._root, name, os.O_PATH))
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[Extent]:
        try:
            fd = open_in(self._root, name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise damaged(f"{name!r:.200} is missing from the image: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise damaged(f"{name!r:.200} is no file")
            yield Extent(fd)
        finally:
            os.close(fd)


class _Archive:
    """Over an open tar, whose headers are read once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._files: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        source = Seekable(Extent(fd))
        for member in TarReader(source):
            name = _normal(os.fsdecode(member.name), "")
            self._links.pop(name, None)
            self._files.pop(name, None)
            if member.kind == stat.S_IFREG and member.runs is None:
                self._files[name] = source.offset, member.size
            elif member.kind == stat.S_IFLNK:
                self._links[name] = _normal(os.fsdecode(member.link), name.rpartition("/")[0])
            elif member.kind == HARD_LINK:
                self._links[name] = _normal(os.fsdecode(member.link), "")
            if len(self._files) + len(self._links) > _FILES_LIMIT:
                raise damaged("it has more files than an image has")

    def _find(self, name: str) -> tuple[int, int] | None:
        for _ in range(_LINKS_LIMIT):
            if (found := self._files.get(name)) is not None:
                return found
            if name not in self._links:
                break
            name = self._links[name]
        return None

    def holds(self, name: str) -> bool:
        return self._find(_normal(name, "")) is not None

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[Extent]:
        if (found := self._find(_normal(name, ""))) is None:
            raise damaged(f"{name!r:.200} is missing from the image")
        yield Extent(self._fd, *found)


def _normal(name: str, folder: str) -> str:
    """A path from the image's folder; `..` stays inside."""
    parts: list[str] = [] if name.startswith("/") else [part for part in folder.split("/") if part]
    for part in name.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def document(blobs: Blobs, name: str, digest: str | None = None) -> Any:
    """A JSON file, proved against its digest (`sha256:<hex>`) if that is given."""
    with blobs.opened(name) as extent:
        if extent.size > _DOCUMENT_LIMIT:
            raise damaged(f"{name!r:.200} is too long")
        data = extent.read()
    if digest is not None and digest != "sha256:" + hashlib.sha256(data).hexdigest():
        raise damaged(f"{name} is not what its digest says")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(f"{name} is no JSON: {error}") from error
