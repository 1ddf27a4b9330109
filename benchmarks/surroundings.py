"""What else the machine does: a number measured beside other people's work is not the system's."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from benchmarks.host import busy_seconds

__all__ = ["Surroundings"]

QUIET_SHARE = 0.15
WINDOW_SECONDS = 0.3


class Surroundings:
    """Looks at the CPUs while the benchmark itself is idle; with `wait_s` it waits that long, at most, for others to be quiet."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self._wait_s = wait_s
        self.shares: list[float] = []

    async def look(self) -> float:
        """Share of all CPUs' time that others take now, after the wait; noted."""
        deadline = time.monotonic() + self._wait_s
        while (share := await self._share()) > QUIET_SHARE and time.monotonic() < deadline:
            await asyncio.sleep(WINDOW_SECONDS)
        self.shares.append(round(share, 3))
        if share > QUIET_SHARE:
            print(f"other work takes {share:.0%} of the CPUs: the numbers are worse than the system", file=sys.stderr, flush=True)
        return share

    async def _share(self) -> float:
        before, started = busy_seconds(), time.monotonic()
        await asyncio.sleep(WINDOW_SECONDS)
        elapsed = (time.monotonic() - started) * (os.cpu_count() or 1)
        return min(1.0, (busy_seconds() - before) / elapsed)

    def to_json(self) -> dict[str, Any]:
        """What others took at each look, and whether that was little enough to trust the numbers."""
        return {"cpu_share_of_others": self.shares, "quiet": all(share <= QUIET_SHARE for share in self.shares)}
