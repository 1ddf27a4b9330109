"""The tree of commands. Each module registers its own, so that a command's text and its work stand together."""

from __future__ import annotations

import sys

import typer

from dsec._native import NativeBinaryMissing
from dsec.cli import check, copy, environments, node, packserver, run, sandboxes, snapshots, store, traces
from dsec.cli.output import die
from libdsec.errors import DSecError, Unsupported

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="dsec",
    help="Sandboxes for training and evaluating agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (node, run, sandboxes, snapshots, copy, check):
    module.register(app)
traces.register(environments.app)
app.add_typer(environments.app, name="env")
packserver.register(store.app)
app.add_typer(store.app, name="store")


def run_app() -> None:
    """Parse the command line and run; ends the process. A fault of the system that a command did not expect is one line, too."""
    try:
        app()
    except (DSecError, NativeBinaryMissing, OSError) as error:
        die(_typed(error), as_json="--json" in sys.argv)


def _typed(error: DSecError | NativeBinaryMissing | OSError) -> DSecError:
    if isinstance(error, DSecError):
        return error
    if isinstance(error, NativeBinaryMissing):
        return Unsupported(str(error))
    return DSecError(f"{error.filename}: {error.strerror}" if error.filename else str(error), cause="os-error")
