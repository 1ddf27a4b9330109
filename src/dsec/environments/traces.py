"""What was read of an environment, in what order: recorded on one node, read ahead on the next that mounts it.

    <store>/traces/<hex of the layer>.json

The server of packs keeps the order in which pieces were first asked for since it started; `record` takes those of one environment's
packs. Packs are shared, so a trace may name pieces that another environment's sandboxes wanted of them. A trace is advice: whatever is
wrong with it costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import msgspec

from dsec.environments.blobcache import PackAccess
from dsec.environments.durable import write_durably
from dsec.environments.store import LayerStore
from libdsec.errors import DSecError, NotFound

__all__ = ["Trace", "TraceRead", "load_trace", "record_trace", "replay_trace", "save_trace"]

_AT_ONCE: Final = 4
_PIECE: Final = 1 << 20
_NEAR: Final = 64 << 10
"""Reads of one pack that are this near to each other, one soon after the other, become one."""


class TraceRead(msgspec.Struct, frozen=True, array_like=True):
    """A range of a pack."""

    pack: str
    offset: int
    length: int


class Trace(msgspec.Struct, kw_only=True):
    """The reads of `layer` (a digest) and of those below it, in the order of the first time."""

    format: Literal["dsec-trace-1"] = "dsec-trace-1"
    layer: str
    reads: list[TraceRead]

    @property
    def bytes(self) -> int:
        """How much a replay reads."""
        return sum(read.length for read in self.reads)


class _Told(msgspec.Struct):
    chunk_bytes: int
    reads: list[tuple[str, int, int]]


def _packs(store: LayerStore, digest: str) -> dict[str, int]:
    """Pack to its size, of the layer and of those below it."""
    identity = store.manifest(digest).identity
    found = {use.digest: use.size for use in identity.packs}
    for below in identity.below:
        found |= {use.digest: use.size for use in store.manifest(below).identity.packs}
    return found


def record_trace(store: LayerStore, access: PackAccess, digest: str) -> Trace:
    """What was read of the layer's packs since the server of packs started. NotFound where none serves."""
    sizes = _packs(store, digest)
    try:
        told = msgspec.convert(access.trace(list(sizes)), _Told) if sizes else _Told(1, [])
    except OSError:
        raise NotFound("no server of packs runs here that could have recorded reads (`dsec up --store-way server`)", field="name") from None
    reads: list[TraceRead] = []
    for name, chunk, count in told.reads:
        pack = f"sha256:{name}"
        offset = chunk * told.chunk_bytes
        reads.append(TraceRead(pack, offset, min(count * told.chunk_bytes, sizes[pack] - offset)))
    return Trace(layer=digest, reads=_joined(reads))


def _joined(reads: Sequence[TraceRead]) -> list[TraceRead]:
    joined: list[TraceRead] = []
    for read in reads:
        last = joined[-1] if joined else None
        if last is not None and last.pack == read.pack and 0 <= read.offset - (last.offset + last.length) <= _NEAR:
            joined[-1] = TraceRead(read.pack, last.offset, read.offset + read.length - last.offset)
        else:
            joined.append(read)
    return joined


def _file(store: LayerStore, digest: str) -> Path:
    return store.root / "traces" / f"{digest.removeprefix('sha256:')}.json"


def save_trace(store: LayerStore, trace: Trace) -> None:
    """For every node that shares the store."""
    with store.building.lease() as aside:
        write_durably(_file(store, trace.layer), msgspec.json.encode(trace) + b"\n", aside=aside)


def load_trace(store: LayerStore, digest: str) -> Trace | None:
    """None where there is none that can be read. It was written by another node: what is not in the layer's packs is left out."""
    try:
        trace = msgspec.json.decode(_file(store, digest).read_bytes(), type=Trace)
        sizes = _packs(store, digest)
    except (OSError, msgspec.DecodeError, DSecError):
        return None
    trace.reads = [read for read in trace.reads if read.offset >= 0 < read.length <= sizes.get(read.pack, 0) - read.offset]
    return trace


def replay_trace(access: PackAccess, trace: Trace, *, stop: threading.Event | None = None) -> int:
    """Read what the trace says, in its order, into the node's caches; returns the bytes read. What cannot be read is left out.

    Through the server these reads come after everybody else's. Blocks: run it in a thread.
    """
    pieces = [
        TraceRead(read.pack, at, min(_PIECE, read.offset + read.length - at))
        for read in trace.reads
        for at in range(read.offset, read.offset + read.length, _PIECE)
    ]
    with contextlib.ExitStack() as opened:
        files: dict[str, int] = {}
        for pack in dict.fromkeys(piece.pack for piece in pieces):
            with contextlib.suppress(OSError):
                # O_NOATIME tells the server that this is a prefetch.
                files[pack] = fd = os.open(access.device(pack), os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME)
                opened.callback(os.close, fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

        def read(piece: TraceRead) -> int:
            if piece.pack not in files or (stop is not None and stop.is_set()):
                return 0
            with contextlib.suppress(OSError):
                return len(os.pread(files[piece.pack], piece.length, piece.offset))
            return 0

        # Few at a time: a page that waits in the queue of a prefetch makes those wait who need it now.
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dsec-replay") as pool:
            return sum(pool.map(read, pieces))
