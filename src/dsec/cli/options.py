"""Options that several commands share, and how a command runs against a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from dsec.cli.output import die, failures
from libdsec import DSecClient
from libdsec.errors import InvalidArgument, SandboxFailed

__all__ = [
    "JsonOption",
    "RunOption",
    "StateOption",
    "StoreOption",
    "TokenOption",
    "UrlOption",
    "from_store",
    "pairs",
    "run_folder",
    "state_folder",
    "with_client",
]

T = TypeVar("T")
STORE_SECONDS = 30.0

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", envvar="DSEC_URL", help="unix:///path or http://host:port of the server.", show_default="this machine's"),
]
TokenOption = Annotated[str | None, typer.Option("--token", envvar="DSEC_TOKEN", help="For a server on TCP.")]
# No look at any of the folders: a command must be able to say what it has to where one of them is on a file system that hangs.
StateOption = Annotated[
    Path,
    typer.Option("--state", envvar="DSEC_STATE", parser=Path, metavar="PATH", help="State folder: layers, journal, sandboxes' disks."),
]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", envvar="DSEC_STORE", parser=Path, metavar="PATH", help="Shared store of layers; by default STATE/store."),
]
RunOption = Annotated[Path, typer.Option("--run", envvar="DSEC_RUN", parser=Path, metavar="PATH", help="Run folder: sockets and mounts.")]

state_folder = Path("/var/lib/dsec")
run_folder = Path("/run/dsec")


def default_url(url: str | None) -> str | None:
    """Where no server is named, the one of DSEC_RUN."""
    run = os.environ.get("DSEC_RUN")
    return url or (f"unix://{run}/dsec.sock" if run else None)


def with_client(
    url: str | None, token: str | None, work: Callable[[DSecClient], Awaitable[T]], *, as_json: bool = False, failed_code: int | None = None
) -> T:
    """Open a client, do `work`, close; an error ends the process with one line and its exit code, `failed_code` if given."""

    async def whole() -> T:
        async with DSecClient(default_url(url), token) as client:
            return await work(client)

    with failures(as_json, code=failed_code):
        return asyncio.run(whole())


def from_store(what: str, action: Callable[[], T], *, as_json: bool) -> T:
    """The answer to a question of the store that takes a moment; an error, a store that hangs or Ctrl-C ends the process with a word.

    DSEC_STORE_PATIENCE is how many seconds a store may take. The kernel lets no signal through to who waits in a file system that hangs,
    so the question is put in another thread.
    """
    from dsec.environments.deadlines import within

    try:
        patience = float(os.environ.get("DSEC_STORE_PATIENCE") or STORE_SECONDS)
    except ValueError:
        die(InvalidArgument("DSEC_STORE_PATIENCE is a number of seconds", field="DSEC_STORE_PATIENCE"), as_json=as_json)
    with failures(as_json):
        try:
            return within(patience, what, action)
        except TimeoutError as error:
            raise SandboxFailed(f"store: {error}", field="store", cause="store-lost", ran="unknown") from error


def pairs(items: list[str], option: str) -> dict[str, str]:
    """`NAME=value` each."""
    result: dict[str, str] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise InvalidArgument(f"{option} takes NAME=value, not {item!r}", field=option)
        result[name] = value
    return result
