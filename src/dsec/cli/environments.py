"""`dsec env`: environments on this machine. They work on the state folder; no server need be up."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli import pictures
from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, from_store, run_folder, state_folder
from dsec.cli.output import amount, console, duration, failures, print_json, print_table, tell
from libdsec.errors import DSecError

if TYPE_CHECKING:
    from dsec.environments import BuildProgress, EnvironmentStore

__all__ = ["app"]

app = typer.Typer(help="Build, list, compare and remove environments.", no_args_is_help=True)
pictures.register(app)

_PHASES = {"fetch": "reading", "merge": "merging", "publish": "publishing"}

KindOption = Annotated[str | None, typer.Option("--kind", help="base, workspace or toolkit; by default what the source suggests.")]
DestOption = Annotated[str | None, typer.Option("--dest", help="Folder in the sandbox for a workspace or toolkit.")]
CollapseOption = Annotated[
    int,
    typer.Option("--collapse-below", min=0, metavar="MB", help="Layers of an image become one up to so many megabytes (10^6) of contents."),
]


def _phase(step: BuildProgress) -> str:
    text = _PHASES.get(step.phase, step.phase)
    return f"{text} layer {step.layer} of {step.layers}" if step.layers else text


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Callable[[BuildProgress], None]]:
    """A bar on a terminal, one line for each phase and layer elsewhere."""
    if quiet:
        yield lambda _: None
        return
    if not console.is_terminal:
        seen: list[str] = []

        def line(step: BuildProgress) -> None:
            if (text := _phase(step)) not in seen:
                seen.append(text)
                console.print(f"{name}: {text}", markup=False)

        yield line
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def update(step: BuildProgress) -> None:
            bar.update(task, description=f"{name}: {_phase(step)}", completed=step.done, total=step.total or None)

        yield update


def _build_one(name: str, as_json: bool, store: EnvironmentStore, **arguments: Any) -> None:
    from dsec.environments.build import build

    base, _, tag = name.partition(":")
    started = time.monotonic()
    with failures(as_json), _progress(name, as_json) as progress:
        command = shlex.join(["dsec", *sys.argv[1:]])
        info = build(store, base, tag=tag or "latest", command=command, progress=progress, **arguments)
    if as_json:
        print_json(info)
    else:
        size = f"{amount(info.metadata_bytes)} metadata, {amount(info.data_bytes)} data of which {amount(info.stored_bytes)} are new"
        tell(f"{info.name} {info.digest[:19]} {info.kind}: {size}, in {duration(time.monotonic() - started)}")


@app.command("build")
def _build(
    name: Annotated[str, typer.Argument(help="name, or name:tag.")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="debian:SUITE, dir:PATH, tar:PATH, oci:PATH[@TAG] (layout or docker archive), docker://HOST/NAME, git:PATH[@REF], "
            "sdist:PATH.",
        ),
    ],
    include: Annotated[list[str] | None, typer.Option("--include", help="Debian packages, several with commas or by repeating.")] = None,
    kind: KindOption = None,
    dest: DestOption = None,
    collapse_below: CollapseOption = 3000,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Build a layer from a source and give it a name."""
    from dsec.environments import EnvironmentStore

    packages = [package for group in include or [] for package in group.split(",") if package]
    environments = EnvironmentStore(state, run, store)
    _build_one(
        name, as_json, environments, source=source, kind=kind, include=packages, dest=dest, collapse_below=collapse_below * 1_000_000
    )


@app.command("pull")
def _pull(
    image: Annotated[str, typer.Argument(help="docker://HOST/NAME[:TAG][@sha256:DIGEST].")],
    name: Annotated[str | None, typer.Argument(help="name, or name:tag; by default the image's last word and tag.")] = None,
    kind: KindOption = None,
    dest: DestOption = None,
    authfile: Annotated[
        Path | None,
        typer.Option("--authfile", parser=Path, metavar="PATH", help="Credentials, as docker login and podman login write them."),
    ] = None,
    tls_verify: Annotated[bool, typer.Option("--tls-verify/--no-tls-verify", help="Demand HTTPS with a certificate that is known.")] = True,
    collapse_below: CollapseOption = 3000,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Build a layer from an image in a registry, through skopeo. What the store has already is not fetched."""
    from dsec.environments import EnvironmentStore

    _build_one(
        name or _named_after(image),
        as_json,
        EnvironmentStore(state, run, store),
        source=image if image.startswith("docker:") else f"docker://{image}",
        kind=kind,
        dest=dest,
        authfile=authfile,
        tls_verify=tls_verify,
        collapse_below=collapse_below * 1_000_000,
    )


def _named_after(image: str) -> str:
    return image.partition("@")[0].rpartition("/")[2]


@app.command("ls")
def _ls(as_json: JsonOption = False, state: StateOption = state_folder, run: RunOption = run_folder, store: StoreOption = None) -> None:
    """List environments."""
    from dsec.environments import EnvironmentStore

    found = from_store("ls", lambda: EnvironmentStore(state, run, store).list(), as_json=as_json)
    if as_json:
        print_json(found)
        return
    now = time.time()
    columns = ("NAME", "KIND", "DIGEST", "METADATA", "DATA", "NEW", "LAYERS", "AGE", "FROM")
    print_table(
        columns,
        (
            (
                info.name,
                info.kind,
                info.digest[:19],
                amount(info.metadata_bytes),
                amount(info.data_bytes),
                amount(info.stored_bytes),
                str(len(info.below) + 1),
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

    info = from_store("show", lambda: EnvironmentStore(state, run, store).show(name), as_json=as_json)
    if as_json:
        print_json(info)
        return
    for label, value in (
        ("name", info.name),
        ("kind", info.kind),
        ("digest", info.digest),
        ("source", info.source or "-"),
        ("made", f"{duration(time.time() - info.created_at)} ago"),
        ("metadata", amount(info.metadata_bytes)),
        ("data", f"{amount(info.data_bytes)} in {info.packs} packs, {amount(info.stored_bytes)} of it new in the store"),
        ("files", f"{info.files}, {amount(info.logical_bytes)} together"),
        *(("lies over", digest) for digest in info.below),
        ("workdir", info.workdir or "/"),
        ("user", info.user or "root"),
        ("environment", " ".join(f"{key}={value}" for key, value in info.env.items()) or "-"),
        ("entrypoint", shlex.join(info.entrypoint) or "-"),
        ("command", shlex.join(info.command) or "-"),
        ("in use by", f"{info.mounted} sandboxes"),
        *((f"from: {key}", value) for key, value in info.provenance.items() if key != "diff_ids"),
    ):
        tell(f"{label:<12} {value}")


def _meanings(environments: EnvironmentStore, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for entry in reversed(environments.history(name)):
        row: dict[str, Any] = {"digest": entry.digest, "since": entry.since, "kept": False, "source": "", "provenance": {}}
        with suppress(DSecError):
            manifest = environments.layers.manifest(entry.digest)
            row |= {"kept": True, "source": manifest.source, "provenance": manifest.provenance}
        rows.append(row)
    return rows


@app.command("history")
def _history(
    name: Annotated[str, typer.Argument(help="name, or name:tag.")],
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Tell what a name has meant, the newest first; each is to be had as name@digest as long as the store keeps it."""
    from dsec.environments import EnvironmentStore

    rows = from_store("history", lambda: _meanings(EnvironmentStore(state, run, store), name), as_json=as_json)
    if as_json:
        print_json(rows)
        return
    now = time.time()
    print_table(
        ("SINCE", "DIGEST", "FROM", "COMMAND"),
        (
            (
                f"{duration(now - row['since'])} ago" if row["since"] else "-",
                row["digest"],
                row["source"] if row["kept"] else "(removed)",
                row["provenance"].get("command", "-"),
            )
            for row in rows
        ),
    )


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

    environments = from_store("open", lambda: EnvironmentStore(state, run, store), as_json=as_json)
    for name in names:
        from_store("rm", partial(EnvironmentStore.remove, environments, name), as_json=as_json)
        if not as_json:
            tell(f"{name} removed")
    if as_json:
        print_json({"removed": names})
