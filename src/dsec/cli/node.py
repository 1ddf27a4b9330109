"""Commands about this machine: up, down, doctor, version."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer

import dsec
from dsec.cli.options import JsonOption
from dsec.cli.output import print_json, print_table

__all__ = ["register"]

WIDE = 160
"""Columns of a terminal that takes the whole table."""


def _doctor(as_json: JsonOption = False) -> None:
    """Try each mechanism of the kernel and tell what this machine can do. Exits with 1 if something that is required is missing."""
    from dsec.doctor import examine

    findings = examine()
    lacking = [finding.mechanism for finding in findings if finding.required and not finding.present]
    if as_json:
        print_json({"ready": not lacking, "missing": lacking, "findings": findings})
        raise typer.Exit(1 if lacking else 0)
    rows = [
        (
            finding.mechanism,
            "yes" if finding.present else "MISSING" if finding.required else "no",
            finding.detail,
            finding.used_for,
            finding.without,
            finding.remedy,
        )
        for finding in findings
    ]
    columns = ("MECHANISM", "HERE", "SEEN", "USED FOR", "WITHOUT IT", "HOW TO GET IT")
    if not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE:
        print_table(columns, rows)
    else:
        # Six columns do not fit: what is lost and how to get it follow for those that are not there.
        print_table(columns[:3], [row[:3] for row in rows])
        typer.echo("")
        for finding in findings:
            if not finding.present:
                typer.echo(f"{finding.mechanism}: for {finding.used_for}; without it: {finding.without}.\n    To get it: {finding.remedy}")
    typer.echo("")
    if lacking:
        typer.echo(f"This machine cannot run container sandboxes: {', '.join(lacking)}.")
        raise typer.Exit(1)
    typer.echo("This machine can run container sandboxes.")


def _version(as_json: JsonOption = False) -> None:
    """Print the version."""
    print_json({"version": dsec.__version__}) if as_json else typer.echo(dsec.__version__)


def _version_option(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsec {dsec.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version_option, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Sandboxes for training and evaluating agents."""


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    from dsec.cli.serving import register as register_serving

    app.callback()(_root)
    register_serving(app)
    app.command("doctor")(_doctor)
    app.command("version")(_version)
