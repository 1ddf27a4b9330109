"""From files' bytes to segments of packs: what is known is referred to, what is new is stored once, what is zero is not stored."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from dsec.environments.durable import sync_folder
from dsec.environments.packs.index import data_name, encode_index, index_name, read_index
from dsec.environments.packs.known import ContentsLost, KnownContents
from dsec.environments.packs.writing import Writer
from dsec.environments.trees.model import BLOCK, Pack, Segment
from libdsec.errors import QuotaExceeded

__all__ = ["INLINE_LIMIT", "MAX_PACKS", "Packer", "Piece", "granularity"]

INLINE_LIMIT: Final = 512
"""Files up to this size lie in the metadata: a block each, and a read of the store, would cost more."""

MAX_PACKS: Final = 64
"""What one layer refers to at most: each pack is a device of its mount."""

Piece: TypeAlias = bytes | bytearray | memoryview | int
"""Bytes of a file, or the length of a run of zeros that nobody needs to look at."""

_WHOLE: Final = 4 << 20
"""Files up to this size are hashed before they are written."""
_LARGE: Final = 1 << 20
_PATIENCE: Final = 4 << 20
"""Small segments are gathered up to this much before they are written."""
_CHUNKS: Final = 1 << 17
"""Of one file at most, as long as that is to be had: a MiB of metadata."""
_FINE: Final = 64 << 10
_COARSE: Final = 1 << 20
_COARSEST: Final = 64 << 20
_ZEROS: Final = bytes(_COARSE)
_FEW_ZEROS: Final = bytes(_FINE)


def granularity(size: int | None) -> int:
    """On what multiples holes begin and end: EROFS lists every chunk of a file that has holes, so large files have large ones.

    What lies between two multiples is stored whole if one byte of it is not zero.
    """
    if size is None:
        return _COARSE
    grain = _FINE
    while grain < _COARSEST and size > grain * _CHUNKS:
        grain *= 2
    return grain


class Packer:
    """Writes one new pack in `folder`, a leased one on the store's file system; nothing there is visible to others.

    `known` tells what need not be stored. To be used by one thread at a time. OSError (a full disk) leaves it unusable, and so does
    QuotaExceeded(cause="disk"), for a pack that would grow beyond `limit` bytes: what files claim to hold is no measure of that, as a byte
    in the middle of a hole may take a whole grain.
    """

    def __init__(self, folder: Path, known: KnownContents | None = None, *, limit: int | None = None) -> None:
        self._folder = folder
        self._known = known
        self.limit = limit
        """May change while it works."""
        self._pack = Pack()
        self._entries: list[tuple[bytes, int]] = []
        self._own: dict[bytes, int] = {}
        self._borrowed: dict[Pack, dict[int, bytes]] = {}
        self._shunned: frozenset[str] = frozenset()
        self._pending = bytearray()
        self._end = 0
        self._fd = -1
        self._writer: Writer | None = None
        self.bytes_added = 0
        """Of all files, holes included."""
        self.bytes_stored = 0
        """Of those that are new, without padding."""

    def add(self, pieces: Iterable[Piece], size: int | None = None) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        """Take in one file; returns its size, its content if it is small, else its segments: what they do not cover is zero.

        `size` is the file's, told by those who know it: it decides how the holes of a file above 4 MiB are cut, so that equal files give
        equal segments only if all tell it or none does.
        """
        source = iter(pieces)
        head = bytearray()
        for piece in source:
            if isinstance(piece, int):
                if len(head) + piece > _WHOLE:
                    return self._add_stream(head, _chain(piece, source), granularity(size))
                head += bytes(piece)
            else:
                head += piece
            if len(head) > _WHOLE:
                return self._add_stream(head, source, granularity(size))
        self.bytes_added += len(head)
        if len(head) <= INLINE_LIMIT:
            return len(head), bytes(head), ()
        segments = []
        with memoryview(head) as view:
            for start, end in _runs(head, len(head), _FINE):
                segments.append(self._segment(start, end - start, *self._keep(view[start:end])))
        return len(head), None, tuple(segments)

    def store(self, pieces: Iterable[bytes], shun: Collection[str] = ()) -> tuple[Pack, int]:
        """Take in one segment as it is, zeros too; returns its pack and first block. Packs whose digests are in `shun` are not used."""
        shunned, self._shunned = self._shunned, frozenset(shun)
        try:
            run = _Run(self)
            run.append(pieces)
            run.close()
        finally:
            self._shunned = shunned
        [segment] = run.segments
        return segment.pack, segment.start

    def finish(self) -> Pack | None:
        """Make the pack whole and durable, still in the folder; None if nothing was new. Its digest is set in the segments' own `Pack`.

        ContentsLost if a pack that was referred to is not what `known` said of it.
        """
        try:
            self._prove_borrowed()
            self._flush()
            self._stop_writer()
            if self._fd < 0 or not self._entries:
                return None
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
        finally:
            self.close()
        index, digest = encode_index(self._entries)
        with (self._folder / index_name(digest)).open("xb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        self._growing.rename(self._folder / data_name(digest))
        sync_folder(self._folder)
        self._pack.digest, self._pack.size = digest, self._end
        return self._pack

    def close(self) -> None:
        """Give up, unless it is finished: what is left in the folder is of no use."""
        with contextlib.suppress(OSError):
            self._stop_writer()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _stop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # -- segments ------------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _segment(offset: int, size: int, pack: Pack, start: int) -> Segment:
        return Segment(offset // BLOCK, -(-size // BLOCK), pack, start)

    def _find(self, digest: bytes) -> tuple[Pack, int] | None:
        """A pack that is in use already is better than one more."""
        if (start := self._own.get(digest)) is not None:
            return self._pack, start
        found = self._known.find(digest) if self._known is not None else []
        if self._shunned:
            found = [(pack, start) for pack, start in found if pack.digest not in self._shunned]
        for pack, start in found:
            if pack in self._borrowed:
                self._borrowed[pack][start] = digest
                return pack, start
        if found and len(self._borrowed) < MAX_PACKS - 1:
            pack, start = found[0]
            self._borrowed[pack] = {start: digest}
            self._touch(pack)
            return pack, start
        return None

    def _touch(self, pack: Pack) -> None:
        """Who removes what is old and unused sees that it is wanted. If it goes all the same, publishing notices."""
        if self._known is not None:
            with contextlib.suppress(OSError):
                os.utime(self._known.folder / index_name(pack.digest))

    def _keep(self, view: memoryview) -> tuple[Pack, int]:
        digest = hashlib.sha256(view).digest()
        if (found := self._find(digest)) is not None:
            return found
        start = self._end
        self._append(view)
        return self._close_segment(digest, start, len(view))

    def _close_segment(self, digest: bytes, start: int, size: int) -> tuple[Pack, int]:
        if padding := -size % BLOCK:
            self._append(memoryview(_ZEROS)[:padding])
        self._own[digest] = start // BLOCK
        self._entries.append((digest, size))
        self.bytes_stored += size
        return self._pack, start // BLOCK

    def _add_stream(self, head: bytearray, source: Iterator[Piece], grain: int) -> tuple[int, None, tuple[Segment, ...]]:
        """A file that is not held in memory: written as it comes, and taken back if it turns out to be known."""
        run = _Run(self)
        for piece in source:
            if isinstance(piece, int):
                self._stream_zeros(run, head, piece, grain)
            else:
                head += piece
            if len(head) >= max(grain, _LARGE):
                run.take(head, len(head) - len(head) % grain, grain)
        run.take(head, len(head), grain)
        run.close()
        self.bytes_added += run.position
        return run.position, None, tuple(run.segments)

    def _stream_zeros(self, run: _Run, head: bytearray, count: int, grain: int) -> None:
        fill = min(count, -len(head) % grain)
        head += bytes(fill)
        if whole := (count - fill) // grain * grain:
            run.take(head, len(head), grain)
            run.skip(whole)
        head += bytes(count - fill - whole)

    # -- the file ------------------------------------------------------------------------------------------------------------------------

    @property
    def _growing(self) -> Path:
        return self._folder / "growing.data"

    def _append(self, view: memoryview) -> None:
        self._end += len(view)
        if self.limit is not None and self._end > self.limit:
            raise QuotaExceeded(f"contents take more than the {self.limit} bytes that there are for them", cause="disk", ran="ran")
        if len(view) < _LARGE:
            self._pending += view
            if len(self._pending) >= _PATIENCE:
                self._flush()
        else:
            self._flush(ahead=len(view))
            self._write(bytes(view), self._end - len(view))

    def _flush(self, ahead: int = 0) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._write(pending, self._end - ahead - len(pending))

    def _write(self, data: bytes | bytearray, offset: int) -> None:
        if self._writer is None:
            if self._fd < 0:
                self._fd = os.open(self._growing, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._writer = Writer(self._fd)
        self._writer.write(data, offset)

    def _take_back(self, start: int) -> None:
        """Forget what was appended since; what is written of it is overwritten or cut off."""
        written = self._end - len(self._pending)
        del self._pending[max(0, start - written) :]
        self._end = start

    def _prove_borrowed(self) -> None:
        if self._known is None:
            return
        for pack, claims in self._borrowed.items():
            try:
                index = read_index(self._known.folder, pack.digest)
            except (OSError, ValueError) as error:
                raise ContentsLost(f"the pack {pack.digest} cannot be read any more: {error}") from error
            if {entry.start: entry.digest for entry in index if entry.start in claims} != claims:
                self._known.forget()
                raise ContentsLost(f"the cache of known contents is wrong about the pack {pack.digest}")


class _Run:
    """A file in the middle of being stored: where it is, and the segment that is growing."""

    def __init__(self, packer: Packer) -> None:
        self.position = 0
        self.segments: list[Segment] = []
        self._packer = packer
        self._hash = hashlib.sha256()
        self._begun = -1
        self._start = 0

    def take(self, head: bytearray, count: int, grain: int) -> None:
        """Store the first `count` bytes of `head` and remove them from it."""
        last = 0
        with memoryview(head) as view:
            for start, end in _runs(head, count, grain):
                if start > 0 or self._begun < 0:
                    self.close(self.position + last)
                    self._open(self.position + start)
                self._hash.update(view[start:end])
                self._packer._append(view[start:end])
                last = end
        if last < count:
            self.close(self.position + last)
        self.position += count
        del head[:count]

    def append(self, pieces: Iterable[bytes]) -> None:
        """Store all of it, without looking for zeros."""
        self._open(self.position)
        for piece in pieces:
            with memoryview(piece) as view:
                self._hash.update(view)
                self._packer._append(view)
            self.position += len(piece)

    def skip(self, count: int) -> None:
        """That many bytes are zero."""
        self.close()
        self.position += count

    def _open(self, position: int) -> None:
        self._hash = hashlib.sha256()
        self._begun = position
        self._start = self._packer._end

    def close(self, position: int | None = None) -> None:
        """End the segment that is growing, if one is, at `position`."""
        if self._begun < 0:
            return
        packer, begun = self._packer, self._begun
        size = (self.position if position is None else position) - begun
        self._begun = -1
        digest = self._hash.digest()
        if (found := packer._find(digest)) is not None:
            packer._take_back(self._start)
        else:
            found = packer._close_segment(digest, self._start, size)
        self.segments.append(packer._segment(begun, size, *found))


def _chain(first: Piece, rest: Iterator[Piece]) -> Iterator[Piece]:
    yield first
    yield from rest


def _runs(data: bytearray, count: int, grain: int) -> Iterator[tuple[int, int]]:
    """Stretches of the first `count` bytes that are not zero, cut at multiples of `grain`."""
    begun = -1
    for start in range(0, count, grain):
        end = min(start + grain, count)
        if _is_zero(data, start, end):
            if begun >= 0:
                yield begun, start
            begun = -1
        elif begun < 0:
            begun = start
    if begun >= 0:
        yield begun, count


def _is_zero(data: bytearray, start: int, end: int) -> bool:
    if data[start] or data[end - 1]:
        return False
    while end - start > len(_ZEROS):
        if not data.startswith(_ZEROS, start):
            return False
        start += len(_ZEROS)
    return data.startswith(_FEW_ZEROS if end - start == _FINE else _ZEROS[: end - start], start)
