"""Tables of what the benchmarks wrote: `python -m benchmarks.report build/bench/*.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_document", "rows"]

BENCH = Path(__file__).resolve().parent.parent / "build" / "bench"
MEASURES = {
    "n": "n",
    "p50_ms": "p50 ms",
    "p50_ms_best_round": "best round",
    "p99_ms": "p99 ms",
    "per_s": "per s",
    "mb_per_s": "MB/s",
    "wall_s": "wall s",
    "synced_s": "to disk s",
    "cpu_s": "CPU s",
    "peak_rss_mb": "peak MB",
    "written_mb": "written MB",
    "stored_mb": "stored MB",
    "failures": "failed",
}
"""Columns of the table; those that a document has nothing for are left out."""


def rows(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything measured in a benchmark's document, by its path of keys; what is absent too, with its reason."""

    def walk(path: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if not isinstance(value, dict):
            return
        if "absent" in value:
            yield path, value
            return
        if any(name in value for name in ("p50_ms", "per_s", "mb_per_s", "failures")):
            yield path, value
        for name, below in value.items():
            if name != "phases":
                yield from walk(f"{path} {name}", below)

    for name, value in document.items():
        if name == "peers":
            for peer, measured in value.items():
                yield from walk(peer, measured)
        elif name.startswith(("dsec", "floor")):
            yield from walk(name, value)


def _measures(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    measured = [(name, value) for name, value in rows(document) if "absent" not in value]
    columns = [measure for measure in MEASURES if any(isinstance(value.get(measure), (int, float)) for _, value in measured)]
    for measure in columns:
        table.add_column(MEASURES[measure], justify="right")
    for name, value in measured:
        cells = (value.get(measure) for measure in columns)
        table.add_row(name.replace("_", " "), *(f"{cell:,}" if isinstance(cell, (int, float)) else "" for cell in cells))
    return table


def _remarks(document: dict[str, Any]) -> Iterator[str]:
    """What is no row of figures: phases of a latency, CPU time, memory, what a peer lacks."""
    surroundings = document.get("surroundings", {})
    if not surroundings.get("quiet", True):
        shares = ", ".join(f"{share:.0%}" for share in surroundings["cpu_share_of_others"])
        yield f"NOT QUIET: other work took {shares} of the CPUs when looked at; the figures are worse than the system"
    for name, value in document.items():
        if not name.startswith("dsec"):
            continue
        if phases := value.get("phases"):
            yield f"{name}, p50 of its phases in ms: " + ", ".join(f"{phase} {one['p50_ms']:g}" for phase, one in phases.items())
        for title in ("cpu_ms_each", "peak_rss_mb", "per_s_by_live", "memory_per_idle_sandbox", "left_after_stop", "leaked"):
            if found := value.get(title) or value.get("create", {}).get(title):
                yield f"{name}, {title.replace('_', ' ')}: " + ", ".join(f"{of} {amount:g}" for of, amount in found.items())
    for name, value in rows(document):
        if value.get("first_error"):
            yield f"{name}, first error: {value['first_error']}"
        if "absent" in value:
            yield f"{name} is absent: {value['absent']}"


def _budgets(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("budget", "limit", "measured", ""):
        table.add_column(name)
    for name, judged in document.get("budgets", {}).items():
        verdict = "[green]met[/green]" if judged["met"] else f"[red]missed by {judged['missed_by']}[/red]"
        table.add_row(name.replace("_", " "), judged["budget"], str(judged["measured"]), verdict)
    return table


def print_document(document: dict[str, Any], console: Console | None = None) -> None:
    """One benchmark: its command, its figures, remarks, budgets."""
    console = console or Console(highlight=False)
    host = document["host"]
    console.print(f"[bold]{document['benchmark']}[/bold]  {document['command']}")
    console.print(
        f"[dim]{host['cpu']}, {document['cpus']} CPUs, {host['memory_mb']} MB, Linux {document['kernel']}, {document['date']}[/dim]\n"
    )
    console.print(_measures(document), "")
    for remark in _remarks(document):
        console.print(remark, style="dim", markup=False)
    console.print("", _budgets(document), "")


def main(arguments: list[str]) -> int:
    """Print all documents; 1 if there are none."""
    files = [Path(name) for name in arguments] or sorted(BENCH.glob("*.json"))
    if not files:
        print(f"no results in {BENCH}: run `make bench`", file=sys.stderr)
        return 1
    for file in files:
        print_document(json.loads(file.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
