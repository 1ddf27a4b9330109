"""Leases of uid ranges: 65,536 host ids for each sandbox, never shared by two on a node, whatever instance they belong to.

An instance takes blocks of 256 ranges, each a file that names its run folder, and gives ranges out of them from memory. Sandboxes outlive
their edge, so a block does too: it goes back when the instance says so, or when its run folder is gone. The files live in /run, which
like the sandboxes does not survive a reboot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from libdsec.errors import Overloaded

__all__ = ["RANGE_BASE", "RANGE_IDS", "UidRanges", "range_base"]

RANGE_BASE: Final = 0x10000000
RANGE_IDS: Final = 65536
BLOCK_RANGES: Final = 256
BLOCKS: Final = (0xFFFF0000 - RANGE_BASE) // RANGE_IDS // BLOCK_RANGES
NODE_FOLDER: Final = Path("/run/dsec-uid-ranges")


def range_base(index: int) -> int:
    """The first host id of a range."""
    return RANGE_BASE + index * RANGE_IDS


class UidRanges:
    """The ranges of the instance with this run folder."""

    def __init__(self, run: Path, *, folder: Path = NODE_FOLDER, blocks: int = BLOCKS) -> None:
        self._owner = os.path.realpath(run)
        self._folder = folder
        self._blocks = blocks
        self._free: deque[int] = deque()
        self._leased: dict[int, str] = {}
        self._held: set[int] = set()

    def open(self) -> None:
        """Find the blocks that this instance already has. Ranges of sandboxes that live must be claimed before the first lease."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        with self._locked():
            for block in range(self._blocks):
                if self._block_owner(block) == self._owner:
                    self._add(block)

    def lease(self, owner: str) -> int:
        """An index that nobody has. Overloaded when the node has none left. Touches files once in 256 calls."""
        if not self._free:
            self._take_block()
        index = self._free.popleft()
        self._leased[index] = owner
        return index

    def claim(self, index: int, owner: str) -> bool:
        """Take the range that a living sandbox already has. False if another sandbox has it."""
        if not 0 <= index < self._blocks * BLOCK_RANGES:
            return False
        if index in self._leased:
            return self._leased[index] == owner
        block = index // BLOCK_RANGES
        if block not in self._held:
            with self._locked():
                if self._block_owner(block) not in (None, self._owner):
                    return False
                self._mark(block)
        self._free.remove(index)
        self._leased[index] = owner
        return True

    def release(self, index: int, owner: str) -> None:
        """Give it back, once nothing runs or owns files by these ids. Harmless if `owner` has it no more."""
        if self._leased.get(index) == owner:
            del self._leased[index]
            self._free.append(index)

    def close(self) -> None:
        """Give back the blocks of which no range is leased; the others wait for the next start."""
        with self._locked():
            for block in list(self._held):
                if not any(index // BLOCK_RANGES == block for index in self._leased):
                    self._held.discard(block)
                    with contextlib.suppress(FileNotFoundError):
                        self._path(block).unlink()
        self._free = deque(index for index in self._free if index // BLOCK_RANGES in self._held)

    def _path(self, block: int) -> Path:
        return self._folder / f"block-{block:04d}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _block_owner(self, block: int) -> str | None:
        """Whose the block is; None if free, or if its owner's run folder is gone and with it every sandbox that it could find again."""
        try:
            owner = self._path(block).read_text()
        except FileNotFoundError:
            return None
        return owner if os.path.isdir(owner) else None

    def _mark(self, block: int) -> None:
        self._path(block).write_text(self._owner)
        self._add(block)

    def _add(self, block: int) -> None:
        self._held.add(block)
        # Taken from the left and given back at the right, so that an id rests before it is used again.
        self._free.extend(range(block * BLOCK_RANGES, (block + 1) * BLOCK_RANGES))

    def _take_block(self) -> None:
        with self._locked():
            for block in range(self._blocks):
                if block not in self._held and self._block_owner(block) is None:
                    self._mark(block)
                    return
        raise Overloaded(f"all {self._blocks * BLOCK_RANGES} uid ranges of this node are taken")
