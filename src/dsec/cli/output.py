"""What the command prints, and how it ends.

Results go to stdout, everything else to stderr. With --json stdout carries exactly one JSON value, an error too: {"error": {...}}.

Exit codes: 0 done; 1 an error; 2 wrong use or a value that is not allowed; 3 not found; 4 no server. `run` and `exec` end as the command
did: its exit code, 128 + the signal's number, 124 after a timeout; 125 is an error of DSec's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from libdsec.errors import ConnectionFailed, DSecError, InvalidArgument, NotFound
from libdsec.schema import ExecResult

__all__ = [
    "COMMAND_FAILED",
    "amount",
    "command_exit_code",
    "console",
    "die",
    "duration",
    "exit_code",
    "failures",
    "print_json",
    "print_table",
    "printable",
    "say",
    "tell",
]

COMMAND_FAILED = 125
_TIMED_OUT = 124
_SECOND_CONTROLS = re.compile("[\x7f-\x9f]")

console = Console(stderr=True, highlight=False)


def printable(text: str, *, lines: bool = False) -> str:
    """Text of strangers (names, paths, what images say) as it may go to a terminal: all that would steer it is escaped.

    With `lines` line ends stay: for text that has some of ours.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or (lines and character in "\n\t") else character.encode("unicode_escape").decode()
        for character in text
    )


def tell(text: str, *, err: bool = False) -> None:
    """One line of a result, on stdout."""
    typer.echo(printable(text), err=err)


def say(text: str) -> None:
    """A line for the person at the terminal, on stderr."""
    console.print(printable(text, lines=True), markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Structs, builtins and lists of them; bytes become base64."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    # some terminals obey these, which JSON allows as they are
    sys.stdout.write(_SECOND_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    sys.stdout.flush()


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Aligned on a terminal, tab-separated in a pipe."""
    if not sys.stdout.isatty():
        sys.stdout.write("\t".join(columns) + "\n")
        for row in rows:
            sys.stdout.write("\t".join(map(printable, row)) + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False).print(table, markup=False)


def amount(size: int | None) -> str:
    """Bytes as a person reads them."""
    if size is None:
        return "-"
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """Seconds as a person reads them."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def _next_step(error: DSecError) -> str:
    if isinstance(error, ConnectionFailed) and error.ran == "not-run":
        return "is the server up? Start it with `dsec up`, or name another with --url or DSEC_URL"
    if isinstance(error, NotFound) and error.field in ("environment", "container_image"):
        return "`dsec env ls` shows what there is, `dsec env build NAME --from debian:bookworm` makes one"
    if isinstance(error, NotFound) and error.field == "sandbox_id":
        return "`dsec ps --all` shows the sandboxes"
    if isinstance(error, NotFound) and error.field == "op_id":
        return "`dsec logs SANDBOX` shows its commands"
    if error.ran == "unknown" and error.cause != "os-error" and error.field != "store":
        return "it may have run: `dsec logs` shows what is recorded"
    return ""


def exit_code(error: DSecError) -> int:
    """Of a command that is not the guest's."""
    if isinstance(error, InvalidArgument):
        return 2
    if isinstance(error, NotFound):
        return 3
    return 4 if isinstance(error, ConnectionFailed) else 1


def die(error: DSecError, *, as_json: bool, code: int | None = None) -> NoReturn:
    """Print one clear line and end."""
    if as_json:
        print_json(error.to_wire())
    else:
        subject = f"{error.field}: " if error.field and error.field not in error.message else ""
        step = _next_step(error)
        say(f"dsec: {subject}{error.message}" + (f"\n      {step}" if step else ""))
    # Not SystemExit: a Typer command may be inside an event loop's task, whose other tasks must not turn an error into a traceback.
    sys.stdout.flush()
    raise SystemExit(exit_code(error) if code is None else code)


@contextmanager
def failures(as_json: bool, *, code: int | None = None) -> Iterator[None]:
    """An error in the block ends the process with one line and its exit code, `code` if given; Ctrl-C ends it with 130."""
    try:
        yield
    except DSecError as error:
        die(error, as_json=as_json, code=code)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def command_exit_code(result: ExecResult) -> int:
    """What a shell would have ended with."""
    if result.timed_out:
        return _TIMED_OUT
    if result.exit_code is not None:
        return result.exit_code
    return 128 + result.signal if result.signal is not None else COMMAND_FAILED
