"""`dsec pack-diff`, `dsec restore`, `dsec fork`: what a sandbox has written is kept, taken up again, branched."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dsec.cli.options import JsonOption, TokenOption, UrlOption, pairs, with_client
from dsec.cli.output import amount, die, duration, print_json, tell
from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import DSecError
from libdsec.schema import PackInfo, SandboxInfo

__all__ = ["register"]

Hostname = Annotated[str, typer.Option("--hostname")]
Label = Annotated[list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="May be given several times.")]
Ttl = Annotated[float | None, typer.Option("--ttl", help="Stop it after so many idle seconds.")]
TtlMax = Annotated[float | None, typer.Option("--ttl-max", help="Stop it after so many seconds, busy or not.")]


def _pack_diff(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    name: Annotated[str, typer.Argument(help="name, or name:tag.")],
    kind: Annotated[
        str, typer.Option("--kind", help="snapshot: all its files. workspace, toolkit: the difference, for any base.")
    ] = "snapshot",
    scrub: Annotated[
        list[str] | None, typer.Option("--scrub", metavar="GLOB", help="Left out, as /build/** or *.pyc; may be given several times.")
    ] = None,
    default_scrub: Annotated[bool, typer.Option(help="Leave out temporary files, downloaded packages and shell histories.")] = True,
    wait: Annotated[bool, typer.Option(help="Wait until it is published.")] = True,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Publish what a sandbox has written as a layer, while it goes on."""

    async def work(client: DSecClient) -> PackInfo:
        sandbox = await client.get(sandbox_id)
        chosen: Literal["snapshot", "workspace", "toolkit"] = kind  # type: ignore[assignment]
        return await sandbox.pack_diff(name, kind=chosen, scrub=scrub or (), default_scrub=default_scrub, wait=wait)

    info = with_client(url, token, work, as_json=as_json)
    if as_json:
        print_json(info)
    elif info.state == "packing":
        tell(f"{info.op_id}: the snapshot is taken, {sandbox_id} stood for {info.stopped_ms:.1f} ms; {info.name}:{info.tag} follows")
    else:
        new = f"{amount(info.metadata_bytes)} metadata, {amount(info.data_bytes)} data of which {amount(info.new_bytes)} new"
        took = f"in {duration((info.total_ms or 0) / 1000)}, {sandbox_id} stood for {info.stopped_ms:.1f} ms"
        tell(f"{info.name}:{info.tag} {info.digest[:19]} {info.kind}: {info.files} files, {new}, {took}")


def _restore(
    name: Annotated[str, typer.Argument(help="What pack-diff published: name, name:tag or name@sha256:...")],
    hostname: Hostname = "",
    label: Label = None,
    ttl: Ttl = None,
    ttl_max: TtlMax = None,
    network: Annotated[str, typer.Option("--network", help="none or nat.")] = "none",
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Make a sandbox that begins with the files of a snapshot, and print its id. `dsec run` takes snapshots too, and more options."""
    try:
        args = DSecContainerRunArgs(
            hostname=hostname,
            labels=pairs(label or [], "--label"),
            ttl_running_stop=ttl,
            ttl_max=ttl_max,
            network=network,  # type: ignore[arg-type]
        )
    except DSecError as error:
        die(error, as_json=as_json)

    async def work(client: DSecClient) -> SandboxInfo:
        return (await client.restore(name, args)).created

    info = with_client(url, token, work, as_json=as_json)
    print_json(info) if as_json else tell(info.sandbox_id)


def _fork(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 1,
    hostname: Hostname = "",
    label: Label = None,
    ttl: Ttl = None,
    ttl_max: TtlMax = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Make sandboxes that begin with the files that this one has now, and print their ids."""
    try:
        labels = pairs(label or [], "--label")
    except DSecError as error:
        die(error, as_json=as_json)

    async def work(client: DSecClient) -> list[SandboxInfo]:
        sandbox = await client.get(sandbox_id)
        made = await sandbox.fork(count, hostname=hostname or None, labels=labels, ttl_running_stop=ttl, ttl_max=ttl_max)
        return [each.created for each in made]

    made = with_client(url, token, work, as_json=as_json)
    if as_json:
        print_json(made)
    else:
        for info in made:
            tell(info.sandbox_id)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("pack-diff")(_pack_diff)
    app.command("restore")(_restore)
    app.command("fork")(_fork)
