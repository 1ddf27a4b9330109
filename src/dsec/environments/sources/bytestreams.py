"""A stream of bytes, cut as its reader wants: from chunks that come, or from a file where what is skipped is not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from dsec.environments.sources.streams import Extent

__all__ = ["ByteSource", "Chunked", "Seekable"]

_PIECE = 1 << 20


class ByteSource(Protocol):
    """Forward only."""

    def take(self, size: int) -> bytes:
        """The next bytes; fewer only at the end."""
        ...

    def pieces(self, size: int) -> Iterator[bytes]:
        """The next bytes as they come, in all fewer only at the end."""
        ...

    def skip(self, size: int) -> int:
        """Leave out the next bytes; returns how many were there."""
        ...


class Chunked:
    """Over chunks that come one after the other."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = b""
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end <= len(self._chunk):
            data = self._chunk[self._at : end]
            self._at = end
            return data
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[bytes]:
        while size:
            left = len(self._chunk) - self._at
            if not left:
                chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self._chunk, self._at = chunk, 0
                continue
            count = min(size, left)
            start, self._at = self._at, self._at + count
            size -= count
            yield self._chunk if count == len(self._chunk) else self._chunk[start : start + count]

    def skip(self, size: int) -> int:
        skipped = 0
        while skipped < size:
            left = len(self._chunk) - self._at
            if not left:
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._chunk, self._at = chunk, 0
                continue
            count = min(size - skipped, left)
            self._at += count
            skipped += count
        return skipped


class Seekable:
    """Over part of a file."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent

    @property
    def offset(self) -> int:
        """Of the next byte in the file."""
        return self.extent.start + self.extent.position

    def take(self, size: int) -> bytes:
        return self.extent.read(size)

    def pieces(self, size: int) -> Iterator[bytes]:
        while size and (piece := self.extent.read(min(size, _PIECE))):
            size -= len(piece)
            yield piece

    def skip(self, size: int) -> int:
        count = min(size, self.extent.size - self.extent.position)
        self.extent.position += count
        return count
