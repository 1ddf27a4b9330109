"""`dsec store`: the shared store of layers itself. No server need be up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, run_folder, state_folder
from dsec.cli.output import amount, die, print_json
from libdsec.errors import DSecError

__all__ = ["app"]

app = typer.Typer(help="Look after the store of layers.", no_args_is_help=True)


@contextmanager
def _failures(as_json: bool) -> Iterator[None]:
    try:
        yield
    except DSecError as error:
        die(error, as_json=as_json)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


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

    with _failures(as_json):
        report = EnvironmentStore(state, run, store).collect_garbage(grace_seconds=grace, dry_run=dry_run)
    if as_json:
        print_json(report)
        return
    if report.skipped:
        typer.echo("another collection is at work")
        return
    verb = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(report.layers)} layers and {len(report.packs)} packs {verb}, {amount(report.bytes)}")
    if report.waiting:
        typer.echo(f"{report.waiting} more are unused, {amount(report.waiting_bytes)}, but not known to be for {grace:g} s")
    for name in report.unreadable:
        typer.echo(f"{name} is damaged: nothing was removed that it may refer to", err=True)
