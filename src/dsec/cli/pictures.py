"""`dsec env tree` and `dsec env diff`: what environments are made of, and in what two of them differ."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, from_store, run_folder, state_folder, store_root
from dsec.cli.output import amount, duration, print_json, tell

if TYPE_CHECKING:
    from dsec.environments.anatomy import LayerPart
    from dsec.environments.apart import Told
    from dsec.environments.trees import Difference

__all__ = ["register"]

_WIDTH: Final = 32
_MEMORY, _SHARED, _OWN, _REST = "█", "▓", "▒", "·"


# -- tree ----------------------------------------------------------------------------------------------------------------------------


def _tree(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="One environment, or those of a sandbox from the bottom.")],
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Draw the layers, the topmost first: their sizes, what they share with other environments, what of them is in memory."""
    from dsec.environments import EnvironmentStore
    from dsec.environments.anatomy import dissect

    parts = from_store(lambda _: dissect(EnvironmentStore(state, run, store), names), as_json=as_json, root=store_root(state, store))
    if as_json:
        print_json(parts)
        return
    for line in draw(parts):
        tell(line)


def draw(parts: list[LayerPart]) -> Iterator[str]:
    """The picture, line by line; `parts` from the bottom."""
    largest = max((part.data_bytes for part in parts), default=0)
    now = time.time()
    for number, part in enumerate(reversed(parts)):
        last = number == len(parts) - 1
        stem = "   " if last else "│  "
        origin = f"{duration(now - part.created_at)} ago, {part.source}"
        yield f"{'└─' if last else '├─'} {part.name or 'layer'} ({part.kind})  {part.digest[:19]}  {origin}"
        yield f"{stem}{_bar(part, largest)}  {amount(part.data_bytes)} data, {amount(part.metadata_bytes)} metadata, {part.files} files"
        notes = [f"{amount(part.shared_bytes)} shared with others ({_percent(part.shared_bytes, part.data_bytes)})"]
        if part.cached_bytes is not None:
            notes.append(f"{amount(part.cached_bytes)} in memory ({_percent(part.cached_bytes, part.data_bytes)})")
        if part.traced_bytes is not None:
            notes.append(f"{amount(part.traced_bytes)} read as traced ({_percent(part.traced_bytes, part.data_bytes)})")
        yield f"{stem}{', '.join(notes)}"
        for index, layer in enumerate(reversed(part.made_of)):
            branch = "└─" if index == len(part.made_of) - 1 else "├─"
            size = f"{amount(layer.data_bytes)}, {layer.files} files" if layer.digest else "not kept"
            yield f"{stem}{branch} image layer {len(part.made_of) - index}  {layer.diff_id[:19]}  {size}"
    yield f"{_MEMORY} in memory  {_SHARED} shared with other environments  {_OWN} its own; bars by size"


def _percent(share: int, whole: int) -> str:
    return f"{100 * share / whole:.0f} %" if whole else "-"


def _bar(part: LayerPart, largest: int) -> str:
    if not part.data_bytes or not largest:
        return _REST * _WIDTH
    length = max(1, round(_WIDTH * part.data_bytes / largest))
    memory = round(length * (part.cached_bytes or 0) / part.data_bytes)
    shared = max(0, min(length, round(length * part.shared_bytes / part.data_bytes)) - memory)
    return (_MEMORY * memory + _SHARED * shared).ljust(length, _OWN)[:length].ljust(_WIDTH, _REST)


# -- diff ----------------------------------------------------------------------------------------------------------------------------


def _diff(
    before: Annotated[str, typer.Argument(metavar="A")],
    after: Annotated[str, typer.Argument(metavar="B")],
    times: Annotated[bool, typer.Option("--times", help="Tell also what differs in nothing but its time.")] = False,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Tell in what two environments differ: + new in B, - gone, ~ changed. No file's content is read."""
    from dsec.environments import EnvironmentStore
    from dsec.environments.differing import differences

    def compare(_: Told) -> list[dict[str, Any]]:
        found = differences(EnvironmentStore(state, run, store), before, after)
        return [_entry(difference) for difference in found if times or difference.aspects != ("time",)]

    found = from_store(compare, as_json=as_json, root=store_root(state, store))
    if as_json:
        print_json(found)
        return
    grown = 0
    counts = {"+": 0, "-": 0, "~": 0}
    for entry in found:
        counts[entry["change"]] += 1
        grown += entry["grown_bytes"]
        aspects = f"  ({', '.join(entry['aspects'])})" if entry["aspects"] else ""
        tell(f"{entry['change']} {entry['path']}{aspects}")
    tell(f"{counts['+']} new, {counts['-']} gone, {counts['~']} changed, {'-' if grown < 0 else '+'}{amount(abs(grown))}", err=True)


def _entry(difference: Difference) -> dict[str, Any]:
    node = difference.after or difference.before
    assert node is not None
    path = "/" + os.fsdecode(difference.path).encode(errors="backslashreplace").decode()
    if stat.S_ISDIR(node.mode) and difference.path:
        path += "/"
    change = "+" if difference.before is None else "-" if difference.after is None else "~"
    return {"change": change, "path": path, "aspects": list(difference.aspects), "grown_bytes": difference.grown}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("tree")(_tree)
    app.command("diff")(_diff)
