"""`dsec store`: the shared store of layers itself. No server need be up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, run_folder, state_folder
from dsec.cli.output import amount, console, failures, print_json, print_table, tell

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

    with failures(as_json):
        report = EnvironmentStore(state, run, store).collect_garbage(grace_seconds=grace, dry_run=dry_run)
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

    with failures(as_json):
        report = EnvironmentStore(state, run, store).report()
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


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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

    with failures(as_json), _bar(as_json) as progress:
        report = EnvironmentStore(state, run, store).verify(repair=repair, progress=progress)
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
