"""`dsec run` and `dsec exec`: a command in a sandbox, as if it ran here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from dsec.cli.options import JsonOption, TokenOption, UrlOption, pairs, with_client
from dsec.cli.output import COMMAND_FAILED, command_exit_code, die, print_json, say
from dsec.cli.terminal import follow, window_size
from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import DSecError, InvalidArgument
from libdsec.sandbox import Sandbox
from libdsec.schema import ExecResult

__all__ = ["register"]

KILL_SECONDS = 5.0
INTERACTIVE_SHELL = "command -v bash >/dev/null 2>&1 && exec bash; exec sh"
"""What runs where no command is given."""

# All that follows the sandbox or the image belongs to the command, dashes included.
REST = {"allow_interspersed_args": False, "ignore_unknown_options": False}

Interactive = Annotated[bool, typer.Option("--interactive", "-i", help="Send this stdin to the command.")]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give the command a terminal.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="May be given several times.")]
Workdir = Annotated[str, typer.Option("--workdir", "-w", help="Working directory; by default the environment's.")]
User = Annotated[str, typer.Option("--user", "-u", help="name, uid, name:group or uid:gid.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds after which the command's whole tree is ended.")]
Command = Annotated[list[str] | None, typer.Argument(help="Program and arguments; a shell if none.")]


def _words(command: list[str] | None) -> list[str]:
    """The command without the `--` that may set it apart."""
    words = list(command or [])
    return words[1:] if words[:1] == ["--"] else words


def _check_terminal(tty: bool) -> None:
    if tty and not os.isatty(0):
        raise InvalidArgument("-t needs a terminal on stdin, and this is none: leave it out", field="--tty")


async def _command(
    sandbox: Sandbox,
    command: list[str],
    *,
    interactive: bool,
    tty: bool,
    env: dict[str, str],
    workdir: str,
    user: str,
    timeout: float | None,
    as_json: bool,
) -> int:
    """Run it in the sandbox, connected to this process; its exit code."""
    chosen = env | ({"TERM": os.environ.get("TERM", "xterm")} if tty else {})
    shell = None if command else INTERACTIVE_SHELL
    if as_json and not tty:
        stdin = await asyncio.to_thread(_all_of_stdin) if interactive else None
        result = await _whole(sandbox, command, shell, stdin=stdin, env=chosen, cwd=workdir or None, user=user or None, timeout=timeout)
        print_json(result)
        return command_exit_code(result)
    rows, cols = window_size()
    process = await sandbox.start(
        command or None,
        shell=shell,
        open_stdin=interactive,
        tty=tty,
        rows=rows,
        cols=cols,
        env=chosen,
        cwd=workdir or None,
        user=user or None,
        timeout=timeout,
    )
    try:
        result = await follow(process, terminal=tty, stdin=interactive)
    except BrokenPipeError:  # the reader of our output has left, as in `dsec exec ... | head`
        await process.kill()
        return 141
    except asyncio.CancelledError:
        with contextlib.suppress(DSecError, TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await process.kill()
        raise
    finally:
        await process.aclose()
    if result.timed_out:
        say(f"dsec: ended after its timeout of {timeout:g} s")
    if result.oom:
        say("dsec: the sandbox's memory limit ended a process of it")
    return command_exit_code(result)


def _all_of_stdin() -> bytes:
    with open(0, "rb", closefd=False) as stdin:
        return stdin.read()


async def _of_image(client: DSecClient, layers: list[str], words: list[str]) -> list[str]:
    """The entrypoint of the topmost layer that has one or a command, and its command unless `words` are given."""
    for layer in reversed(layers):
        info = await client.environment(layer)
        if info.entrypoint or info.command:
            return [*info.entrypoint, *(words or info.command)]
    if not words:
        raise InvalidArgument(f"{layers[0]} says nothing of what to run: give a command", field="--as-image")
    return words


async def _whole(sandbox: Sandbox, command: list[str], shell: str | None, **options: object) -> ExecResult:
    if command:
        return await sandbox.exec(command, **options)  # type: ignore[arg-type]
    return await sandbox.run_shell(shell or "", **options)  # type: ignore[arg-type]


def _ends_with(work: Callable[[DSecClient], Awaitable[int]], url: str | None, token: str | None, as_json: bool) -> None:
    raise typer.Exit(with_client(url, token, work, as_json=as_json, failed_code=COMMAND_FAILED))


def _run(
    image: Annotated[str, typer.Argument(help="Base environment: name, name:tag or name@sha256:...")],
    command: Command = None,
    interactive: Interactive = False,
    tty: Tty = False,
    env: Env = None,
    workdir: Workdir = "",
    user: User = "",
    timeout: Timeout = None,
    layer: Annotated[list[str] | None, typer.Option("--layer", help="Workspace or toolkit above the base, from the bottom.")] = None,
    cpus: Annotated[float, typer.Option("--cpus", help="CPU cores, fractions allowed.")] = 4.0,
    memory: Annotated[int, typer.Option("--memory", "-m", help="Memory limit in MiB.")] = 4096,
    disk: Annotated[int, typer.Option("--disk", help="What it may write to its disk, in MiB.")] = 10240,
    pids: Annotated[int, typer.Option("--pids", help="Most processes and threads.")] = 4096,
    ttl: Annotated[float | None, typer.Option("--ttl", help="Stop it after so many idle seconds.")] = None,
    ttl_max: Annotated[float | None, typer.Option("--ttl-max", help="Stop it after so many seconds, busy or not.")] = None,
    network: Annotated[str, typer.Option("--network", help="none or nat.")] = "none",
    hostname: Annotated[str, typer.Option("--hostname")] = "",
    label: Annotated[list[str] | None, typer.Option("--label", metavar="NAME=VALUE")] = None,
    backend: Annotated[str, typer.Option("--backend", help="container; others as the node has them.")] = "container",
    as_image: Annotated[
        bool, typer.Option("--as-image", help="Run the image's own entrypoint, with COMMAND (if given) in the place of the image's own.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox running when the command has ended.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Make the sandbox, start the command if there is one, print the id, end.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Make a sandbox, run a command in it, stop it.

    The exit code is the command's own. Options go before IMAGE; what follows it belongs to the command.
    """
    try:
        _check_terminal(tty)
        args = DSecContainerRunArgs(
            environment=[image, *(layer or [])],
            memory_limit_mb=memory,
            cpu_cores_limit=cpus,
            disk_limit_mb=disk,
            pids_limit=pids,
            ttl_running_stop=ttl,
            ttl_max=ttl_max,
            network=network,  # type: ignore[arg-type]
            init_user=user,
            env=pairs(env or [], "--env"),
            workdir=workdir,
            hostname=hostname,
            labels=pairs(label or [], "--label"),
        )
    except DSecError as error:
        die(error, as_json=as_json, code=COMMAND_FAILED)

    words = _words(command)

    async def work(client: DSecClient) -> int:
        nonlocal words
        if as_image:
            words = await _of_image(client, args.environment, words)
        sandbox = await client.run(args, backend=backend)  # type: ignore[arg-type]
        if detach:
            try:
                if words:
                    await sandbox.start(words, background=True)
            except BaseException:
                await sandbox.stop()
                raise
            print_json(await sandbox.info()) if as_json else typer.echo(sandbox.sandbox_id)
            return 0
        if keep:
            code = await connected(sandbox)
            say(f"dsec: {sandbox.sandbox_id} goes on; `dsec rm {sandbox.sandbox_id}` stops it")
            return code
        async with sandbox:
            return await connected(sandbox)

    async def connected(sandbox: Sandbox) -> int:
        return await _command(
            sandbox, words, interactive=interactive, tty=tty, env={}, workdir="", user="", timeout=timeout, as_json=as_json
        )

    _ends_with(work, url, token, as_json)


def _exec(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    command: Command = None,
    interactive: Interactive = False,
    tty: Tty = False,
    env: Env = None,
    workdir: Workdir = "",
    user: User = "",
    timeout: Timeout = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Run a command in a sandbox; `-it` gives a terminal.

    The exit code is the command's own. Options go before SANDBOX; what follows it belongs to the command.
    """
    try:
        _check_terminal(tty)
        variables = pairs(env or [], "--env")
    except DSecError as error:
        die(error, as_json=as_json, code=COMMAND_FAILED)

    async def work(client: DSecClient) -> int:
        return await _command(
            await client.get(sandbox_id),
            _words(command),
            interactive=interactive,
            tty=tty,
            env=variables,
            workdir=workdir,
            user=user,
            timeout=timeout,
            as_json=as_json,
        )

    _ends_with(work, url, token, as_json)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("run", context_settings=REST)(_run)
    app.command("exec", context_settings=REST)(_exec)
