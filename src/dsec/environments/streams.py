"""Reading archives forward only, decompressed, with no faith in what they claim."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Final, Protocol

from dsec.environments.tools import leashed
from libdsec.errors import InvalidArgument

__all__ = ["ByteReader", "ForwardReader", "damaged", "decompressed"]

_DAMAGE: Final = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""What the decompressors raise for input that is cut off or garbled."""

_ONE_READ_LIMIT: Final = 64 << 20
"""tarfile reads a whole extended header at once, as long as the archive says it is."""

_TRAILER_LIMIT: Final = 64 << 20


class ByteReader(Protocol):
    """All that is needed of a source."""

    def read(self, size: int = -1, /) -> bytes: ...


def damaged(why: str) -> InvalidArgument:
    """The error for an archive as a whole."""
    return InvalidArgument(f"source: the archive is damaged: {why}", field="source", cause="archive")


class _Counting(io.RawIOBase):
    """Tells how far the compressed file was read."""

    def __init__(self, file: IO[bytes], tell: Callable[[int], None]) -> None:
        self._file, self._tell, self._done = file, tell, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._done += len(data)
        self._tell(self._done)
        return len(data)


@contextlib.contextmanager
def decompressed(fd: int, progress: Callable[[int, int], None]) -> Iterator[ByteReader]:
    """The bytes of the file open as `fd` (read from its beginning, not closed); gzip, bzip2, xz and zstd are known by their first bytes."""
    total = os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "rb", buffering=0) as raw:
        magic = raw.read(6)
        raw.seek(0)
        counted = io.BufferedReader(_Counting(raw, lambda done: progress(done, total)), 1 << 18)
        if magic.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=counted) as stream:
                yield stream
        elif magic.startswith(b"BZh"):
            with bz2.BZ2File(counted) as stream:
                yield stream
        elif magic.startswith((b"\xfd7zXZ\x00", b"\x5d\x00\x00")):
            with lzma.LZMAFile(counted) as stream:
                yield stream
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            with _through_zstd(raw.fileno()) as stream:
                yield stream
        else:
            yield counted


class _Checked:
    """A command's stdout, whose end is only an end if the command says that all was well."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdout is not None
        self._stdout = process.stdout

    def read(self, size: int = -1, /) -> bytes:
        data = self._stdout.read(size)
        if size != 0 and (size < 0 or len(data) < size) and self._process.wait() != 0:
            raise EOFError("zstd could not read it to its end")
        return data


@contextlib.contextmanager
def _through_zstd(fd: int) -> Iterator[ByteReader]:
    with subprocess.Popen(leashed(["zstd", "-dcq"]), stdin=fd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield _Checked(process)
        finally:
            process.kill()


class ForwardReader:
    """What tarfile needs of a file, over a stream that only goes forward: `seek` skips. Damage is InvalidArgument."""

    def __init__(self, stream: ByteReader) -> None:
        self._stream = stream
        self._position = 0
        self._hash = hashlib.sha256()
        self.last = b""
        """The last piece read: at the end of an archive that is whole, a block of zeros."""

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _ONE_READ_LIMIT:
            raise damaged(f"a header of {size} bytes")
        pieces: list[bytes] = []
        missing = size
        try:
            while missing and (piece := self._stream.read(missing)):
                pieces.append(piece)
                missing -= len(piece)
        except _DAMAGE as error:
            raise damaged(str(error)) from error
        self.last = b"".join(pieces)
        self._position += len(self.last)
        self._hash.update(self.last)
        return self.last

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or position < self._position:
            raise damaged("it would have to be read backwards")
        while self._position < position and self.read(min(position - self._position, 1 << 20)):
            pass
        return self._position

    def drain(self) -> str:
        """Read what comes after the end and return the SHA-256 (hex) of the whole stream."""
        limit = self._position + _TRAILER_LIMIT
        while self.read(1 << 20):
            if self._position > limit:
                raise damaged("too much comes after its end")
        return self._hash.hexdigest()
