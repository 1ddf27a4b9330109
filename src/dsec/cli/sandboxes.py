"""Commands about sandboxes that exist: ps, show, logs, pause, resume, rm."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import typer

from dsec.cli.options import JsonOption, TokenOption, UrlOption, pairs, with_client
from dsec.cli.output import amount, command_exit_code, die, duration, exit_code, print_json, print_table, say, tell
from libdsec import DSecClient
from libdsec.errors import DSecError, InvalidArgument, NotFound
from libdsec.schema import ExecResult, ProcessInfo, SandboxInfo

__all__ = ["register"]

Ids = Annotated[list[str], typer.Argument(metavar="SANDBOX...")]
ENDED = ("stopped", "failed")
USAGE_MOST = 256


def _layers(info: SandboxInfo) -> str:
    return " + ".join(layer.partition("@")[0] for layer in info.environment) or "-"


async def _with_usage(client: DSecClient, found: list[SandboxInfo]) -> list[SandboxInfo]:
    """The same with what they use now, which a list does not tell; beyond some hundreds it would take too long to ask for each."""
    live = [info for info in found if info.state not in ENDED]
    if len(live) > USAGE_MOST:
        return found

    async def one(info: SandboxInfo) -> SandboxInfo:
        try:
            return (await client.get(info.sandbox_id)).created if info.state not in ENDED else info
        except NotFound:
            return info

    return list(await asyncio.gather(*map(one, found)))


def _ps(
    every: Annotated[bool, typer.Option("--all", "-a", help="Stopped and failed ones too.")] = False,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="Only those with it.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids alone.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """List sandboxes."""
    try:
        labels = pairs(label or [], "--label")
    except DSecError as error:
        die(error, as_json=as_json)

    async def work(client: DSecClient) -> list[SandboxInfo]:
        found = [info for info in await client.list(labels=labels) if every or info.state not in ENDED]
        return found if quiet else await _with_usage(client, found)

    shown = with_client(url, token, work, as_json=as_json)
    if as_json:
        print_json(shown)
    elif quiet:
        for info in shown:
            tell(info.sandbox_id)
    else:
        now = time.time()
        columns = ("SANDBOX", "ENVIRONMENT", "STATE", "AGE", "IDLE", "MEMORY", "DISK", "PROCESSES")
        print_table(
            columns,
            (
                (
                    info.sandbox_id,
                    _layers(info),
                    info.state + (f" ({info.cause or info.stop_reason})" if info.cause or info.stop_reason else ""),
                    duration(now - info.created_at),
                    duration(info.idle_seconds),
                    amount(info.memory_bytes),
                    amount(info.disk_bytes),
                    str(info.running_processes),
                )
                for info in shown
            ),
        )


def _show(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Tell all about one sandbox, its story too."""

    async def work(client: DSecClient) -> SandboxInfo:
        return await (await client.get(sandbox_id)).info()

    info = with_client(url, token, work, as_json=as_json)
    if as_json:
        print_json(info)
        return
    lines = [
        ("sandbox", f"{info.sandbox_id} ({info.backend}, generation {info.generation})"),
        (
            "state",
            info.state
            + (f", {info.cause or info.stop_reason}" if info.cause or info.stop_reason else "")
            + (f": {info.detail}" if info.detail else ""),
        ),
        ("environment", " + ".join(info.environment)),
        ("made in", "-" if info.create_ms is None else f"{info.create_ms:.1f} ms"),
        ("memory", f"{amount(info.memory_bytes)}, at most {amount(info.memory_peak_bytes)}"),
        ("CPU", duration(info.cpu_seconds)),
        ("disk", amount(info.disk_bytes)),
        ("labels", ", ".join(f"{name}={value}" for name, value in info.labels.items()) or "-"),
    ]
    for name, value in lines:
        tell(f"{name:<12} {value}")
    for line in info.story:
        at = time.strftime("%H:%M:%S", time.localtime(line.at))
        tell(f"  {at} {line.before} -> {line.after}: {line.event}" + (f" ({line.detail})" if line.detail else ""))


def _outcome(process: ProcessInfo) -> str:
    if process.result is None:
        return process.state
    if process.result.timed_out:
        return "timed out"
    code = command_exit_code(process.result)
    return f"exit {code}" if process.result.signal is None else f"signal {process.result.signal}"


def _logs(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    operation: Annotated[str | None, typer.Argument(metavar="[OPERATION]", help="Id of one command: its output.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the command ends.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """List the commands that ran in a sandbox, or print the output of one."""
    if operation is None:

        async def listing(client: DSecClient) -> list[ProcessInfo]:
            return list(await (await client.get(sandbox_id)).processes())

        _print_processes(with_client(url, token, listing, as_json=as_json), as_json)
        return

    async def output(client: DSecClient) -> ExecResult | None:
        process = await (await client.get(sandbox_id)).process(operation)
        info = await process.info()
        if as_json or info.state != "running":
            if info.state == "lost":
                raise NotFound(f"the outcome of {operation} was lost with its sandbox", field="operation")
            return await process.wait() if follow or info.state != "running" else None
        await _stream(process, follow)
        return None

    result = with_client(url, token, output, as_json=as_json)
    if result is None:
        return
    if as_json:
        print_json(result)
        return
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.buffer.flush()
    dropped = result.stdout_dropped + result.stderr_dropped
    if dropped:
        say(f"dsec: {amount(dropped)} in the middle were not kept")


async def _stream(process: object, follow: bool) -> None:
    """Print what a running command has written, and with `follow` what it writes."""
    pieces = process.output().__aiter__()  # type: ignore[attr-defined]
    while True:
        try:
            # What is kept already comes at once; a pause means that all of it came.
            stream, data = await (pieces.__anext__() if follow else asyncio.wait_for(pieces.__anext__(), 0.3))
        except (StopAsyncIteration, TimeoutError):
            return
        target = sys.stderr.buffer if stream == 2 else sys.stdout.buffer
        target.write(data)
        target.flush()


def _print_processes(processes: list[ProcessInfo], as_json: bool) -> None:
    if as_json:
        print_json(processes)
        return
    print_table(
        ("OPERATION", "STARTED", "OUTCOME", "TIME", "OUTPUT", "COMMAND"),
        (
            (
                process.op_id,
                time.strftime("%H:%M:%S", time.localtime(process.started_at)),
                _outcome(process),
                duration(process.result.wall_ms / 1e3) if process.result else "-",
                amount(process.result.stdout_bytes + process.result.stderr_bytes) if process.result else "-",
                _command_text(process),
            )
            for process in processes
        ),
    )


def _command_text(process: ProcessInfo) -> str:
    text = " ".join(process.argv) if process.argv else process.shell or ""
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:59] + "…"


def _each(sandbox_ids: list[str], verb: str, url: str | None, token: str | None, as_json: bool) -> None:
    """Do it to every one, eight at a time; report each; an error of one does not spare the others."""

    async def work(client: DSecClient) -> list[SandboxInfo | DSecError]:
        gate = asyncio.Semaphore(8)

        async def one(sandbox_id: str) -> SandboxInfo | DSecError:
            async with gate:
                try:
                    sandbox = await client.get(sandbox_id)
                    info: SandboxInfo = await getattr(sandbox, verb)()
                except DSecError as error:
                    return error
                return info

        return list(await asyncio.gather(*map(one, sandbox_ids)))

    outcomes = with_client(url, token, work, as_json=as_json)
    errors = [outcome for outcome in outcomes if isinstance(outcome, DSecError)]
    if as_json:
        print_json([outcome.to_wire() if isinstance(outcome, DSecError) else outcome for outcome in outcomes])
        raise typer.Exit(exit_code(errors[0]) if errors else 0)
    for sandbox_id, outcome in zip(sandbox_ids, outcomes, strict=True):
        if not isinstance(outcome, DSecError):
            tell(f"{sandbox_id} {outcome.state}")
    for error in errors[1:]:
        say(f"dsec: {error.message}")
    if errors:
        die(errors[0], as_json=False)


def _pause(sandbox_ids: Ids, as_json: JsonOption = False, url: UrlOption = None, token: TokenOption = None) -> None:
    """Freeze sandboxes; they keep their state and use no CPU."""
    _each(sandbox_ids, "pause", url, token, as_json)


def _resume(sandbox_ids: Ids, as_json: JsonOption = False, url: UrlOption = None, token: TokenOption = None) -> None:
    """Let paused sandboxes go on."""
    _each(sandbox_ids, "resume", url, token, as_json)


def _rm(
    sandbox_ids: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX...")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every sandbox of the server.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Stop sandboxes and remove all of them. Their records stay for `dsec logs`."""
    chosen = sandbox_ids or []
    if every:
        if chosen:
            die(InvalidArgument("give sandboxes or --all, not both", field="SANDBOX"), as_json=as_json)
        chosen = [
            info.sandbox_id for info in with_client(url, token, lambda client: client.list(), as_json=as_json) if info.state not in ENDED
        ]
    elif not chosen:
        die(InvalidArgument("name at least one sandbox, or give --all", field="SANDBOX"), as_json=as_json)
    _each(chosen, "stop", url, token, as_json)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("ps")(_ps)
    app.command("show")(_show)
    app.command("logs")(_logs)
    app.command("pause")(_pause)
    app.command("resume")(_resume)
    app.command("rm")(_rm)
