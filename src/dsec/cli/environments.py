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
from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, from_store, run_folder, state_folder, store_root
from dsec.cli.output import amount, console, duration, print_json, print_table, tell
from libdsec.errors import DSecError

if TYPE_CHECKING:
    from dsec.environments import BuildProgress, EnvironmentStore
    from dsec.environments.apart import Told
    from libdsec.schema import EnvironmentInfo

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


def _left_of_build(name: str, reached: list[str]) -> str:
    came = f"it came as far as {reached[-1]}" if reached else "it had not begun"
    kept = "layers of images that were read whole are kept, the rest of what it stored goes with the next build or `dsec store gc`"
    # the last step of all is the name: it was not told of any more
    named = "may mean what was built or" if reached and reached[-1].startswith(_PHASES["publish"]) else "means"
    return f"{came}; {name} {named} what it did before; {kept}"


@contextmanager
def _progress(name: str, quiet: bool, seen: list[str]) -> Iterator[Callable[[BuildProgress], None]]:
    """A bar on a terminal, one line for each phase and layer elsewhere; all of these come into `seen`."""

    def line(step: BuildProgress) -> None:
        if (text := _phase(step)) not in seen:
            seen.append(text)
            if not quiet:
                console.print(f"{name}: {text}", markup=False)

    if quiet or not console.is_terminal:
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
            if (text := _phase(step)) not in seen:
                seen.append(text)
            bar.update(task, description=f"{name}: {_phase(step)}", completed=step.done, total=step.total or None)

        yield update


def _build_one(name: str, as_json: bool, state: Path, run: Path, store: Path | None, **arguments: Any) -> None:
    from dsec.environments import EnvironmentStore
    from dsec.environments.build import build

    base, _, tag = name.partition(":")
    started = time.monotonic()
    command = shlex.join(["dsec", *sys.argv[1:]])

    def work(told: Told) -> EnvironmentInfo:
        environments = EnvironmentStore(state, run, store)

        def progress(step: BuildProgress) -> None:
            told(step, key=_phase(step))

        return build(environments, base, tag=tag or "latest", command=command, progress=progress, **arguments)

    reached: list[str] = []
    info = from_store(
        work,
        as_json=as_json,
        root=store_root(state, store),
        left=lambda: _left_of_build(name, reached),
        long_calls=True,
        progress=_progress(name, as_json, reached),
    )
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
    packages = [package for group in include or [] for package in group.split(",") if package]
    below = collapse_below * 1_000_000
    _build_one(name, as_json, state, run, store, source=source, kind=kind, include=packages, dest=dest, collapse_below=below)


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
    _build_one(
        name or _named_after(image),
        as_json,
        state,
        run,
        store,
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

    found = from_store(lambda _: EnvironmentStore(state, run, store).list(), as_json=as_json, root=store_root(state, store))
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
                duration(now - info.created_at if info.created_at else None),
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

    info = from_store(lambda _: EnvironmentStore(state, run, store).show(name), as_json=as_json, root=store_root(state, store))
    if as_json:
        print_json(info)
        return
    for label, value in (
        ("name", info.name),
        ("kind", info.kind),
        ("digest", info.digest),
        ("source", info.source or "-"),
        ("made", _ago(info.created_at)),
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


def _ago(moment: float | None) -> str:
    return f"{duration(time.time() - moment)} ago" if moment else "-"


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

    rows = from_store(lambda _: _meanings(EnvironmentStore(state, run, store), name), as_json=as_json, root=store_root(state, store))
    if as_json:
        print_json(rows)
        return
    print_table(
        ("SINCE", "DIGEST", "FROM", "COMMAND"),
        (
            (
                _ago(row["since"]),
                row["digest"],
                row["source"] if row["kept"] else "(removed)",
                row["provenance"].get("command", "-"),
            )
            for row in rows
        ),
    )


def _may_be_removed(name: str) -> str:
    return f"{name} may be removed or not, as `dsec env ls` tells when the store is back"


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

    for name in names:

        def remove(_: Told, name: str = name) -> None:
            EnvironmentStore(state, run, store).remove(name)

        from_store(remove, as_json=as_json, root=store_root(state, store), left=partial(_may_be_removed, name))
        if not as_json:
            tell(f"{name} removed")
    if as_json:
        print_json({"removed": names})
