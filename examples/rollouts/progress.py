"""The view while the job runs: a live table on a terminal, one line for each change of phase elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .rollout import STAGES, Outcome, Stage

__all__ = ["Progress"]

_STYLES = {"waiting": "dim", "acting": "cyan", "verifying": "yellow", "done": "green", "failed": "bold red"}


class Progress:
    """Knows the stage of every rollout. A context manager; `phase` and `tell` may be called before and after it too."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._stages: dict[int, Stage] = {}
        self._policies: dict[int, str] = {}
        self._rewards: dict[str, list[float]] = {}
        self._started = time.monotonic()
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True) if console.is_terminal else None
        )
        self._printed_quarters = 0

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def phase(self, text: str) -> None:
        """What the job does now."""
        self._phase = text
        if not self._live:
            self._print(text)

    def expect(self, outcomes: list[Outcome]) -> None:
        """The rollouts to come."""
        self._stages = {outcome.index: "waiting" for outcome in outcomes}
        self._policies = {outcome.index: outcome.policy for outcome in outcomes}

    def tell(self, index: int, stage: Stage) -> None:
        """A rollout moved on."""
        self._stages[index] = stage
        ended = self._ended()
        quarters = 4 * ended // len(self._stages)
        if not self._live and stage in ("done", "failed") and quarters > self._printed_quarters:
            self._printed_quarters = quarters
            self._print(f"{ended} of {len(self._stages)} rollouts ended")

    def _ended(self) -> int:
        return sum(stage in ("done", "failed") for stage in self._stages.values())

    def _print(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False, highlight=False)

    def _render(self) -> RenderableType:
        head = Text(f"{time.monotonic() - self._started:6.1f} s  {self._phase}")
        if not self._stages:
            return head
        table = Table(box=None, header_style="bold")
        table.add_column("policy")
        for stage in STAGES:
            table.add_column(stage, justify="right", style=_STYLES[stage])
        for policy in dict.fromkeys(self._policies.values()):
            counts = Counter(self._stages[index] for index, name in self._policies.items() if name == policy)
            table.add_row(policy, *[str(counts[stage] or "·") for stage in STAGES])
        return Group(head, table, ProgressBar(total=len(self._stages), completed=self._ended(), width=60))
