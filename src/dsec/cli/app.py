"""The tree of commands. Each module registers its own, so that a command's text and its work stand together."""

from __future__ import annotations

import typer

from dsec.cli import check, copy, environments, node, run, sandboxes

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="dsec",
    help="Sandboxes for training and evaluating agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (node, run, sandboxes, copy, check):
    module.register(app)
app.add_typer(environments.app, name="env")


def run_app() -> None:
    """Parse the command line and run; ends the process."""
    app()
