"""Options that several commands share, and how a command runs against a server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dsec.cli.output import failures
from libdsec import DSecClient
from libdsec.errors import InvalidArgument, SandboxFailed

if TYPE_CHECKING:
    from dsec.environments.apart import Told

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
    "store_root",
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
    """Open a client, do `work`, close; an error ends the process with one line and its exit code, `failed_code` if given.

    A terminal that closes, or SIGTERM, cancels `work`, so that it leaves nothing behind; the exit code is 128 and the signal's number.
    """

    async def whole() -> T:
        loop, task, ended = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
        assert task is not None, "it runs as one"

        def end(number: int) -> None:
            ended.append(number)
            task.cancel()

        for number in (signal.SIGHUP, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        try:
            async with DSecClient(default_url(url), token) as client:
                return await work(client)
        except asyncio.CancelledError:
            if ended:
                raise typer.Exit(128 + ended[0]) from None
            raise

    with failures(as_json, code=failed_code):
        return asyncio.run(whole())


def from_store(
    action: Callable[[Told], T],
    *,
    as_json: bool,
    root: Path,
    left: Callable[[], str] = lambda: "",
    long_calls: bool = False,
    progress: AbstractContextManager[Told] | None = None,
) -> T:
    """Do something with the store in `root`; an error, a store that hangs or Ctrl-C ends this process with a word, and at once.

    DSEC_STORE_PATIENCE is for how many seconds a store may give no answer; as long as something moves, the work may take any time. `left`
    says how far it came and what is left of it. See `Apart`, also for `long_calls` and what `progress` takes; the action works in a process
    of its own, so that nothing it changes is to be seen here but what it returns.
    """
    from dsec.environments.apart import Apart

    with failures(as_json):
        patience = _store_patience()
        try:
            with Apart(action, root, patience_seconds=patience) as work, progress or nullcontext(lambda *_: None) as told:
                return work.result(long_calls=long_calls, told=told)
        except TimeoutError as error:
            what = f"store: {error}{'; ' if (rest := left()) else ''}{rest}"
            raise SandboxFailed(what, field="store", cause="store-lost", ran="unknown") from error


def _store_patience() -> float:
    text = os.environ.get("DSEC_STORE_PATIENCE") or str(STORE_SECONDS)
    try:
        patience = float(text)
    except ValueError:
        patience = 0.0
    if not 0 < patience < inf:
        raise InvalidArgument(f"DSEC_STORE_PATIENCE is {text!r}, not a number of seconds above 0", field="DSEC_STORE_PATIENCE")
    return patience


def store_root(state: Path, store: Path | None) -> Path:
    """Where the store of these options is."""
    return store if store is not None else state / "store"


def pairs(items: list[str], option: str) -> dict[str, str]:
    """`NAME=value` each."""
    result: dict[str, str] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise InvalidArgument(f"{option} takes NAME=value, not {item!r}", field=option)
        result[name] = value
    return result
