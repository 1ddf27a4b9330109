"""`dsec store`: the shared store of layers itself. No server need be up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, from_store, run_folder, state_folder, store_root
from dsec.cli.output import amount, console, print_json, print_table, tell

if TYPE_CHECKING:
    from dsec.environments.report import LayerReport
    from dsec.environments.verify import Damage

__all__ = ["app"]

app = typer.Typer(help="Look after the store of layers.", no_args_is_help=True)


@app.command("gc")
def _gc(
    grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds for which a thing must be known to be unused.")] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Remove what no name, no sandbox of any node and no layer refers to."""
    from dsec.environments import EnvironmentStore

    report = from_store(
        lambda _: EnvironmentStore(state, run, store).collect_garbage(grace_seconds=grace, dry_run=dry_run),
        as_json=as_json,
        root=store_root(state, store),
        left=lambda: "nothing was changed" if dry_run else "each thing is there or removed, none half; the next `dsec store gc` goes on",
        long_calls=True,
    )
    if as_json:
        print_json(report)
        return
    if report.skipped:
        tell("another collection is at work")
        return
    verb = "would be removed" if dry_run else "removed"
    tell(f"{len(report.layers)} layers and {len(report.packs)} packs {verb}, {amount(report.bytes)}")
    if report.waiting:
        tell(f"{report.waiting} more are unused, {amount(report.waiting_bytes)}, but not known to be for {grace:g} s")
    for name in report.unreadable:
        tell(f"{name} is damaged: nothing was removed that it may refer to", err=True)


@app.command("df")
def _df(
    packs: Annotated[bool, typer.Option("--packs", help="Tell of each pack, too.")] = False,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Tell what lies in the store and who uses it."""
    from dsec.environments import EnvironmentStore

    report = from_store(lambda _: EnvironmentStore(state, run, store).report(), as_json=as_json, root=store_root(state, store))
    if as_json:
        print_json(report)
        return
    columns = ("NAME", "KIND", "DIGEST", "LOGICAL", "OWN", "SHARED", "METADATA", "USED BY")
    print_table(
        columns,
        (
            (
                layer.name or "-",
                layer.kind or "damaged",
                layer.digest[:19],
                amount(layer.logical_bytes),
                amount(layer.own_bytes),
                amount(layer.shared_bytes),
                amount(layer.metadata_bytes),
                _users(layer),
            )
            for layer in report.layers
        ),
    )
    if packs:
        typer.echo()
        rows = (
            (pack.digest[:19], amount(pack.bytes), amount(pack.referenced_bytes), amount(pack.dead_bytes), str(pack.layers))
            for pack in sorted(report.packs, key=lambda pack: -pack.bytes)
        )
        print_table(("PACK", "SIZE", "REFERENCED", "DEAD", "LAYERS"), rows)
    typer.echo()
    for label, value in (
        ("layers", f"{len(report.layers)}, {amount(report.metadata_bytes)} of metadata"),
        ("packs", f"{len(report.packs)}, {amount(report.pack_bytes)}, {amount(report.dead_bytes)} of it dead"),
        ("contents", f"{amount(report.data_bytes)} in all layers, stored once: {report.ratio:.2f} times what the packs hold"),
        ("free", amount(report.free_bytes)),
    ):
        tell(f"{label:<12} {value}")


def _users(layer: LayerReport) -> str:
    if layer.damage:
        return f"damaged: {layer.damage}"
    users = [*layer.tags, *(f"node {node}" for node in layer.nodes), *([f"{len(layer.above)} layers"] if layer.above else [])]
    return ", ".join(users) or ("an image's layer" if layer.imported else "nobody")


def _left_of_verify(repair: bool, done: int, total: int) -> str:
    changed = "what is repaired stays so, and the next --repair does the rest" if repair else "nothing was changed"
    return f"{amount(done)} of {amount(total)} were read; {changed}"


@contextmanager
def _bar(quiet: bool, reached: list[int]) -> Iterator[Callable[[int, int], None]]:
    def note(done: int, total: int) -> None:
        reached[:] = done, total

    if quiet or not console.is_terminal:
        yield note
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def update(done: int, total: int) -> None:
            note(done, total)
            bar.update(task, completed=done, total=total)

        yield update


@app.command("verify")
def _verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Bring back what this node or other packs still have; let builds store the rest anew.")
    ] = False,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Read the whole store and name what is damaged, and whom it concerns. Exit code 1 if something is."""
    from dsec.environments import EnvironmentStore

    reached = [0, 0]
    report = from_store(
        lambda told: EnvironmentStore(state, run, store).verify(repair=repair, progress=told),
        as_json=as_json,
        root=store_root(state, store),
        left=lambda: _left_of_verify(repair, *reached),
        long_calls=True,
        progress=_bar(as_json, reached),
    )
    if as_json:
        print_json(report)
    else:
        for damage in report.damages:
            _tell(damage)
        tell(f"{report.layers} layers, {report.packs} packs, {report.segments} segments, {amount(report.bytes)} read")
    if not report.sound:
        raise SystemExit(1)


def _tell(damage: Damage) -> None:
    repaired = " (repaired)" if damage.repaired else ""
    tell(f"{damage.what} {damage.name}: {damage.detail}{repaired}")
    for segment in damage.segments:
        state = ", repaired" if segment.repaired else ""
        tell(f"  segment {segment.number} at {segment.offset}, {segment.size} bytes, sha256:{segment.sha256}{state}")
    if damage.layers and damage.what == "pack":
        tell(f"  concerns {', '.join(digest[:19] for digest in damage.layers)}")
    if damage.tags:
        tell(f"  meant by {', '.join(damage.tags)}")
