"""Deadlines of all sandboxes in one heap and one timer of the loop.

A deadline that moves later leaves its entry where it is: when that comes up, the machine is asked again. So an exec, which moves the idle
deadline, costs nothing here.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from dsec.edge import clock
from dsec.edge.sandbox import Sandbox

__all__ = ["Timers"]


class Timers:
    """Calls `due(sandbox)` when the sandbox's machine may have something to do. One entry a sandbox counts, older ones are passed over."""

    def __init__(self, due: Callable[[Sandbox], None]) -> None:
        self._due = due
        self._heap: list[tuple[float, str, Sandbox]] = []
        self._handle: asyncio.TimerHandle | None = None
        self._armed = 0.0

    def watch(self, sandbox: Sandbox) -> None:
        """The machine's deadline may have come nearer, or appeared."""
        deadline = sandbox.machine.deadline()
        if deadline is None or (sandbox.timer is not None and sandbox.timer <= deadline):
            return
        sandbox.timer = deadline
        heapq.heappush(self._heap, (deadline, sandbox.id, sandbox))
        self._arm()

    def _arm(self) -> None:
        if not self._heap:
            return
        first = self._heap[0][0]
        if self._handle is not None:
            if self._armed <= first:
                return
            self._handle.cancel()
        self._armed = first
        # Loops round timers to a millisecond: one later is sure to be past the deadline.
        self._handle = asyncio.get_running_loop().call_later(max(0.0, first - clock.now()) + 0.001, self._fire)

    def _fire(self) -> None:
        self._handle = None
        now = clock.now()
        heap = self._heap
        while heap and heap[0][0] <= now:
            deadline, _, sandbox = heapq.heappop(heap)
            if sandbox.timer != deadline:
                continue
            sandbox.timer = None
            if not sandbox.over:
                self._due(sandbox)
                self.watch(sandbox)
        self._arm()

    def close(self) -> None:
        """No more calls."""
        if self._handle is not None:
            self._handle.cancel()
        self._heap.clear()
