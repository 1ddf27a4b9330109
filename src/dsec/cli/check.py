"""`dsec self-check`: the contract of a sandbox, tried on a real one."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli.options import JsonOption, TokenOption, UrlOption, with_client
from dsec.cli.output import die, print_json, say
from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import InvalidArgument

__all__ = ["register"]


def _self_check(
    image: Annotated[str, typer.Argument(help="Environment to try it on; it needs sh and the usual tools.")],
    layer: Annotated[list[str] | None, typer.Option("--layer", help="Workspace or toolkit above it.")] = None,
    backend: Annotated[str, typer.Option("--backend")] = "container",
    only: Annotated[list[str] | None, typer.Option("--only", help="Names of checks, or parts of them.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Try what a sandbox promises, on sandboxes made for it. Exits with 1 if a check fails."""
    from dsec.testing import CheckOutcome, check_names, self_check

    if only and not any(part in name for part in only for name in check_names()):
        die(
            InvalidArgument(f"no check has any of {', '.join(only)} in its name: {', '.join(check_names())}", field="--only"),
            as_json=as_json,
        )

    def tell(outcome: CheckOutcome) -> None:
        if not as_json:
            mark = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}[outcome.verdict]
            typer.echo(f"{mark} {outcome.name:<44} {outcome.seconds * 1e3:7.1f} ms  {outcome.detail}".rstrip())

    async def work(client: DSecClient) -> list[CheckOutcome]:
        args = DSecContainerRunArgs(environment=[image, *(layer or [])])
        return await self_check(client, args, backend=backend, only=only, on_outcome=tell)  # type: ignore[arg-type]

    outcomes = with_client(url, token, work, as_json=as_json)
    failed = [outcome for outcome in outcomes if outcome.verdict == "failed"]
    if as_json:
        print_json({"passed": not failed, "checks": outcomes})
    else:
        say(f"dsec: {len(outcomes) - len(failed)} of {len(outcomes)} checks hold")
    raise typer.Exit(1 if failed else 0)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("self-check")(_self_check)
