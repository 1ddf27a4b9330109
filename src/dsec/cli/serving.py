"""`dsec up` and `dsec down`: the node's edge and the API server in one process, and the end of all that they keep."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import secrets
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, run_folder, state_folder
from dsec.cli.output import die, print_json, say
from libdsec.errors import Conflict, Denied, DSecError, InvalidArgument

if TYPE_CHECKING:
    from dsec.edge.ending import Ending
    from dsec.environments import StoreSettings

__all__ = ["register"]

SOCKET = "dsec.sock"
STOP_SECONDS = 60
MIN_CACHE_BYTES = 16 << 20
DOWN_PATIENCE = 3.0
UNMOUNT_SECONDS = 20.0
SWITCH_SECONDS = 0.0005
"""How long a thread of ours waits at most for another that computes. While one takes a snapshot the sandbox's processes stand, and with
Python's own 5 ms they would stand for as long as the event loop decodes a large request."""

ScratchOption = Annotated[
    Path | None,
    typer.Option(
        "--scratch",
        envvar="DSEC_SCRATCH",
        parser=Path,
        metavar="PATH",
        help="Folder for sandboxes' writes, on btrfs; by default STATE/scratch.",
    ),
]
StoreWayOption = Annotated[
    str,
    typer.Option(
        "--store-way",
        envvar="DSEC_STORE_WAY",
        help="How layers' data is read: direct, by the server of packs, or auto: direct where the store is on a local disk.",
    ),
]
StoreCacheOption = Annotated[
    str,
    typer.Option(
        "--store-cache", envvar="DSEC_STORE_CACHE", metavar="SIZE|off", help="Keep blocks of the store on the local disk, e.g. 20G."
    ),
]
StorePatienceOption = Annotated[
    float,
    typer.Option(
        "--store-patience",
        envvar="DSEC_STORE_PATIENCE",
        metavar="SECONDS",
        help="How long a read waits for a store that does not answer, before its sandbox fails.",
    ),
]
StoreVerifyOption = Annotated[
    bool,
    typer.Option("--store-verify", envvar="DSEC_STORE_VERIFY", help="Check what is read of the store against its digests; costs time."),
]


@dataclass(frozen=True, slots=True)
class _Folders:
    state: Path
    run: Path
    store: Path | None


def _store_settings(way: str, cache: str, patience: float, verify: bool) -> StoreSettings:
    from dsec.environments import StoreSettings
    from dsec.environments.blobcache import parse_size, parse_way

    try:
        cache_bytes = parse_size(cache)
    except ValueError as error:
        raise InvalidArgument(f"--store-cache: {error}", field="--store-cache") from None
    if 0 < cache_bytes < MIN_CACHE_BYTES:
        raise InvalidArgument(f"--store-cache is {cache_bytes} bytes, at least {MIN_CACHE_BYTES} or off", field="--store-cache")
    if not 0.1 <= patience <= 3600:
        raise InvalidArgument(f"--store-patience is {patience:g}, allowed is 0.1 to 3600 seconds", field="--store-patience")
    try:
        return StoreSettings(way=parse_way(way), cache_bytes=cache_bytes, patience_seconds=patience, verify_reads=verify)
    except ValueError as error:
        raise InvalidArgument(f"--store-way: {error}", field="--store-way") from None


class _Serving(msgspec.Struct):
    """What `dsec up --json` prints once it serves."""

    url: str
    pid: int
    tcp: str | None = None
    token_file: str | None = None


def _log(level: str) -> None:
    """Ours and the libraries' lines go to stderr, one each."""
    import structlog

    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InvalidArgument(f"--log-level is debug, info, warning or error, not {level!r}", field="--log-level")
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer()
            if sys.stderr.isatty()
            else structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
    )


def _need_root() -> None:
    if os.geteuid() != 0:
        raise Denied("sandboxes need root on their node: run it with sudo, or use another node's server by --url")


def _token(tcp: str | None, token_file: Path | None, folders: _Folders) -> tuple[str | None, Path | None]:
    """The token for TCP and the file that holds it; made on first use. Not an option: those are seen by every user of the machine."""
    if tcp is None:
        return None, None
    if token := os.environ.get("DSEC_TOKEN"):
        return token, None
    file = token_file or folders.state / "token"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as made:
            made.write(secrets.token_urlsafe(32) + "\n")
    token = file.read_text().strip()
    if len(token) < 16:
        raise InvalidArgument(f"{file} holds no token of at least 16 characters", field="--token-file")
    return token, file


def _unmount_all(folders: _Folders, scratch: Path | None, *, tells_store: bool = True) -> None:
    """What only live sandboxes need: the layers' mounts and the scratch image's."""
    from dsec.environments import EnvironmentStore, ScratchStore, StoreSettings

    environments = EnvironmentStore(folders.state, folders.run, folders.store, settings=StoreSettings(patience_seconds=DOWN_PATIENCE))
    environments.node.tells_store = tells_store
    environments.sweep_mounts(())
    environments.close()
    ScratchStore(folders.state, folders.run, path=scratch).close(unmount=True)


def _settle_garbage() -> None:
    """Keep the collector from going over all that lives long, again and again.

    At the default thresholds its runs over thousands of objects cost an eighth of a server's time, and its slowest answers wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _serve(
    folders: _Folders,
    scratch: Path | None,
    packs: StoreSettings,
    tcp: str | None,
    token_file: Path | None,
    remove: bool,
    as_json: bool,
    end: Ending,
) -> None:
    from dsec.apiserver import ApiServer
    from dsec.edge import build_edge
    from dsec.environments.deadlines import within_async

    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ending.set)

    token, token_path = _token(tcp, token_file, folders)
    edge = build_edge(folders, scratch=scratch, packs=packs)
    await edge.open()
    try:
        server = ApiServer(edge, folders.run / SOCKET, tcp, token)
        async with server:
            found = edge.unremoved
            address = f"http://{tcp.rpartition(':')[0]}:{server.tcp_port}" if tcp else None
            serving = _Serving(f"unix://{folders.run / SOCKET}", os.getpid(), address, str(token_path) if token_path else None)
            _settle_garbage()
            _announce(serving, found, remove, as_json)
            await ending.wait()
            # A second Ctrl-C does not wait for anything.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
            if not as_json:
                say("dsec: ending" + (", stopping all sandboxes" if remove else ""))
        if remove:
            await edge.stop_all()
    finally:
        left = edge.unremoved
        end.renew()
        await edge.aclose()
        if left == 0:
            # A call that hangs may hold the node's lock.
            with contextlib.suppress(TimeoutError):
                await within_async(UNMOUNT_SECONDS, "unmount", lambda: _unmount_all(folders, scratch))
    if left and not as_json:
        say(f"dsec: {left} sandboxes go on; `dsec up` finds them again, `dsec down` ends them")


def _announce(serving: _Serving, found: int, remove: bool, as_json: bool) -> None:
    if as_json:
        print_json(serving)
        return
    say(f"dsec: serving on {serving.url}" + (f" and {serving.tcp} (token in {serving.token_file or 'DSEC_TOKEN'})" if serving.tcp else ""))
    if found:
        say(f"dsec: {found} sandboxes found again")
    say("dsec: Ctrl-C ends the server" + (" and all sandboxes" if remove else "; sandboxes go on until `dsec down`"))


def _up(
    tcp: Annotated[str | None, typer.Option("--tcp", metavar="HOST:PORT", help="Serve there too, with a bearer token.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", parser=Path, metavar="PATH", help="Holds the token; by default STATE/token, made on first use."),
    ] = None,
    remove: Annotated[bool, typer.Option("--rm", help="Stop all sandboxes when the server ends.")] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "warning",
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
    scratch: ScratchOption = None,
    store_way: StoreWayOption = "auto",
    store_cache: StoreCacheOption = "off",
    store_patience: StorePatienceOption = 30.0,
    store_verify: StoreVerifyOption = False,
) -> None:
    """Serve this machine's sandboxes, in the foreground.

    Ends on Ctrl-C or SIGTERM. Sandboxes go on, and the next `dsec up` has them again, unless --rm is given.
    """
    import uvloop

    from dsec.edge.ending import Ending

    end = Ending()
    with end.process():
        try:
            _need_root()
            _log(log_level)
            sys.setswitchinterval(SWITCH_SECONDS)
            packs = _store_settings(store_way, store_cache, store_patience, store_verify)
            uvloop.run(end.after(_serve(_Folders(state, run, store), scratch, packs, tcp, token_file, remove, as_json, end)))
        except DSecError as error:
            die(error, as_json=as_json)


def _holder(run: Path) -> int | None:
    """Pid of the server of this run folder. The lock tells whether it lives; the number alone may be another process's by now."""
    try:
        descriptor = os.open(run / "dsec.pid", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).decode().strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)
    return None


def _end_server(pid: int, run: Path) -> None:
    """Ask it to end and wait until it has."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _holder(run) != pid:
            return
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(STOP_SECONDS * 1000):
            raise Conflict(f"the server (pid {pid}) did not end within {STOP_SECONDS} s; end it by hand, then `dsec down` again")
    finally:
        os.close(pidfd)


async def _end_sandboxes(folders: _Folders, scratch: Path | None, *, tells_store: bool) -> int:
    """Take up what is left, stop it, let go; how many there were. A store that is away is not waited for."""
    from dsec.edge import build_edge
    from dsec.environments import StoreSettings

    edge = build_edge(folders, scratch=scratch, packs=StoreSettings(patience_seconds=DOWN_PATIENCE))
    edge.environments.node.tells_store = tells_store
    await edge.open()
    try:
        live = edge.unremoved
        await edge.stop_all()
    finally:
        await edge.aclose()
    return live


def _down(
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
    scratch: ScratchOption = None,
) -> None:
    """End this machine's server if one runs, stop all its sandboxes, unmount everything. Environments and records stay."""
    import uvloop

    from dsec.environments.blobcache import store_answers

    folders = _Folders(state, run, store)
    try:
        _need_root()
        _log("warning")
        pid = _holder(run)
        if pid is not None:
            _end_server(pid, run)
        stopped = 0
        if run.exists() and state.exists():
            tells_store = store_answers(store or state / "store", DOWN_PATIENCE)
            stopped = uvloop.run(_end_sandboxes(folders, scratch, tells_store=tells_store))
            _unmount_all(folders, scratch, tells_store=tells_store)
            with contextlib.suppress(FileNotFoundError):
                (run / SOCKET).unlink()
    except DSecError as error:
        die(error, as_json=as_json)
    if as_json:
        print_json({"server": pid, "stopped": stopped})
    else:
        say(f"dsec: {'the server ended, ' if pid else 'no server ran, '}{stopped} sandboxes stopped, nothing is mounted")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("up")(_up)
    app.command("down")(_down)
