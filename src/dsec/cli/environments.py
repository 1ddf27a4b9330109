"""`dsec env`: environments on this machine. They work on the state folder; no server need be up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, run_folder, state_folder
from dsec.cli.output import amount, console, die, duration, print_json, print_table
from libdsec.errors import DSecError

__all__ = ["app"]

app = typer.Typer(help="Build, list and remove environments.", no_args_is_help=True)

StoreOption = Annotated[Path | None, typer.Option("--store", envvar="DSEC_STORE", help="Shared store of layers; by default STATE/store.")]
_PHASES = {"fetch": "fetching", "image": "writing the image", "digest": "computing the digest", "publish": "publishing"}


@contextmanager
def _failures(as_json: bool) -> Iterator[None]:
    try:
        yield
    except DSecError as error:
        die(error, as_json=as_json)


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Callable[[object], None]]:
    """A bar on a terminal, one line for each phase elsewhere."""
    from dsec.environments.build import BuildProgress

    if quiet:
        yield lambda _: None
        return
    if not console.is_terminal:
        seen: list[str] = []

        def line(step: object) -> None:
            if isinstance(step, BuildProgress) and step.phase not in seen:
                seen.append(step.phase)
                console.print(f"{name}: {_PHASES.get(step.phase, step.phase)}", markup=False)

        yield line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def update(step: object) -> None:
            if isinstance(step, BuildProgress):
                text = f"{name}: {_PHASES.get(step.phase, step.phase)}"
                bar.update(task, description=text, completed=step.done, total=step.total or None)

        yield update


@app.command("build")
def _build(
    name: Annotated[str, typer.Argument(help="name, or name:tag.")],
    source: Annotated[
        str,
        typer.Option("--from", help="debian:SUITE, dir:PATH, tar:PATH, oci:PATH (layout or docker archive), git:PATH[@REF], sdist:PATH."),
    ],
    include: Annotated[list[str] | None, typer.Option("--include", help="Debian packages, several with commas or by repeating.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="base, workspace or toolkit; by default what the source suggests.")] = None,
    dest: Annotated[str | None, typer.Option("--dest", help="Folder in the sandbox for a workspace or toolkit.")] = None,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Build a layer from a source and give it a name."""
    from dsec.environments import EnvironmentStore
    from dsec.environments.build import build

    base, _, tag = name.partition(":")
    packages = [package for group in include or [] for package in group.split(",") if package]
    started = time.monotonic()
    try:
        with _failures(as_json), _progress(name, as_json) as progress:
            info = build(
                EnvironmentStore(state, run, store),
                base,
                source=source,
                kind=kind,  # type: ignore[arg-type]
                include=packages,
                tag=tag or "latest",
                dest=dest,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if as_json:
        print_json(info)
    else:
        size = f"{amount(info.metadata_bytes)} metadata, {amount(info.data_bytes)} data"
        typer.echo(f"{info.name} {info.digest[:19]} {info.kind}: {size}, in {duration(time.monotonic() - started)}")


@app.command("ls")
def _ls(as_json: JsonOption = False, state: StateOption = state_folder, run: RunOption = run_folder, store: StoreOption = None) -> None:
    """List environments."""
    from dsec.environments import EnvironmentStore

    with _failures(as_json):
        found = EnvironmentStore(state, run, store).list()
    if as_json:
        print_json(found)
        return
    now = time.time()
    columns = ("NAME", "KIND", "DIGEST", "METADATA", "DATA", "AGE", "FROM")
    print_table(
        columns,
        (
            (
                info.name,
                info.kind,
                info.digest[:19],
                amount(info.metadata_bytes),
                amount(info.data_bytes),
                duration(now - info.created_at),
                info.source,
            )
            for info in found
        ),
    )


@app.command("show")
def _show(
    name: Annotated[str, typer.Argument()],
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Tell all about one environment."""
    from dsec.environments import EnvironmentStore

    with _failures(as_json):
        info = EnvironmentStore(state, run, store).show(name)
    if as_json:
        print_json(info)
        return
    for label, value in (
        ("name", info.name),
        ("kind", info.kind),
        ("digest", info.digest),
        ("source", info.source or "-"),
        ("metadata", amount(info.metadata_bytes)),
        ("data", amount(info.data_bytes)),
        ("workdir", info.workdir or "/"),
        ("user", info.user or "root"),
        ("environment", " ".join(f"{key}={value}" for key, value in info.env.items()) or "-"),
        ("entrypoint", " ".join(info.entrypoint) or "-"),
        ("in use by", f"{info.mounted} sandboxes"),
    ):
        typer.echo(f"{label:<12} {value}")


@app.command("rm")
def _rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Remove environments that no sandbox uses."""
    from dsec.environments import EnvironmentStore

    environments = EnvironmentStore(state, run, store)
    for name in names:
        with _failures(as_json):
            environments.remove(name)
        if not as_json:
            typer.echo(f"{name} removed")
    if as_json:
        print_json({"removed": names})
