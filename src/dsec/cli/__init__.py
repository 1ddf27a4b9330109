"""The command `dsec`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from dsec.cli.app import run_app  # typer and rich take 0.1 s to import, which `import dsec.cli` need not

    run_app()
