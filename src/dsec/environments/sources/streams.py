"""Compressed files as streams of chunks: read, decompressed and hashed in a thread of their own, with no faith in what they claim.

The decompressors and SHA-256 let go of the interpreter's lock, so that the thread that takes the chunks has a processor for itself.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from backports import zstd
from isal import igzip, igzip_lib

from dsec.environments.sources.refusals import damaged

__all__ = ["ByteReader", "Extent", "Stream", "decompressed", "streamed"]

_CHUNK: Final = 1 << 20
_AHEAD: Final = 8
"""Chunks that wait for their reader at most."""

_READ: Final = 1 << 18
_XZ_MEMORY: Final = 256 << 20
"""Four times what the highest of xz's presets takes."""

_DAMAGE: Final[tuple[type[Exception], ...]] = (
    EOFError,
    zlib.error,
    igzip_lib.IsalError,  # type: ignore[assignment]
    lzma.LZMAError,
    gzip.BadGzipFile,
    zstd.ZstdError,
)
"""What the decompressors raise for input that is cut off or garbled."""


class ByteReader(Protocol):
    """All that is needed of a source."""

    def read(self, size: int = -1, /) -> bytes: ...


class Extent:
    """Part of a file open as `fd`, which stays open and whose own position is left alone."""

    def __init__(self, fd: int, start: int = 0, size: int | None = None) -> None:
        self.fd, self.start = fd, start
        self.size = os.fstat(fd).st_size - start if size is None else size
        self.position = 0

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes; b"" at the end."""
        left = self.size - self.position
        data = os.pread(self.fd, left if size < 0 else min(size, left), self.start + self.position)
        self.position += len(data)
        return data


class _Raw(io.RawIOBase):
    """What the standard library's decompressors want of a file."""

    def __init__(self, source: ByteReader) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Xz:
    """xz and lzma, of which several may follow each other. The standard library's own reader has no limit on memory."""

    def __init__(self, source: ByteReader) -> None:
        self._source = source
        self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes; b"" at the end."""
        while True:
            if self._stream.eof:
                rest = self._stream.unused_data.lstrip(b"\0")  # NULs fill the room between streams
                while not rest and (more := self._source.read(_READ)):
                    rest = more.lstrip(b"\0")
                if not rest:
                    return b""
                self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
            else:
                rest = self._source.read(_READ) if self._stream.needs_input else b""
                if not rest and self._stream.needs_input:
                    raise EOFError("it ends within the compressed stream")
            if data := self._stream.decompress(rest, max_length=size):
                return data


def _opened(source: Extent) -> ByteReader:
    """gzip, bzip2, xz and zstd are known by their first bytes."""
    magic = os.pread(source.fd, min(6, source.size), source.start)
    if magic.startswith(b"\x1f\x8b"):
        return igzip.IGzipFile(fileobj=io.BufferedReader(_Raw(source), _READ), mode="rb")  # type: ignore[no-untyped-call]
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(io.BufferedReader(_Raw(source), _READ))
    if magic.startswith((b"\xfd7zXZ\x00", b"\x5d\x00\x00")):
        return _Xz(source)
    if magic.startswith((b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")):
        return zstd.ZstdFile(io.BufferedReader(_Raw(source), _READ))
    return source


class Stream:
    """The chunks, in order. When they have ended, `sha256` (hex) is that of all of them."""

    def __init__(self, source: ByteReader, tell: Callable[[], None]) -> None:
        self.is_plain = isinstance(source, Extent)
        """Whether the chunks are the file itself."""
        self._source = source
        self._tell = tell
        self._hash = hashlib.sha256()
        self._ready: deque[bytes | BaseException] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._read_all, name="decompress", daemon=True)
        self._thread.start()

    @property
    def sha256(self) -> str:
        """Of what was read, which is all once the chunks have ended."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            chunk = self._ready[0]
            if isinstance(chunk, bytes) and chunk:
                self._ready.popleft()
                self._changed.notify()
        if isinstance(chunk, BaseException):
            raise chunk
        if not chunk:
            raise StopIteration
        self._tell()
        return chunk

    def close(self) -> None:
        """End the thread. It must be able to end: what it reads from was closed by the other side, or is a file."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _read_all(self) -> None:
        end: bytes | BaseException = b""
        try:
            while chunk := self._source.read(_CHUNK):
                self._hash.update(chunk)
                if not self._put(chunk, _AHEAD):
                    return
        except _DAMAGE as error:
            end = damaged(str(error))
        except OSError as error:  # bzip2's has no number; one with a number is the file system's
            end = damaged(str(error)) if error.errno is None else error
        except BaseException as error:
            end = error
        self._put(end, _AHEAD + 1)

    def _put(self, item: bytes | BaseException, limit: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < limit)
            self._ready.append(item)
            self._changed.notify()
            return not self._closed


@contextlib.contextmanager
def decompressed(source: Extent, progress: Callable[[int, int], None]) -> Iterator[Stream]:
    """The bytes of the file, whatever it is compressed with; `progress` is told how much of it was read, and of how much."""
    stream = Stream(_opened(source), lambda: progress(source.position, source.size))
    try:
        yield stream
    finally:
        stream.close()


@contextlib.contextmanager
def streamed(source: ByteReader, progress: Callable[[int], None], interrupt: Callable[[], None]) -> Iterator[Stream]:
    """What a command writes. `interrupt` must end its writing; `progress` is told of the bytes so far."""
    count = 0

    def tell() -> None:
        progress(count)

    class _Counted:
        def read(self, size: int = -1, /) -> bytes:
            nonlocal count
            data = source.read(size)
            count += len(data)
            return data

    stream = Stream(_Counted(), tell)
    try:
        yield stream
    finally:
        interrupt()
        stream.close()
