"""Running the distribution's tools: they die with us, and their failure is a typed error with what they said."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from libdsec.errors import DSecError, InvalidArgument, QuotaExceeded, Unsupported

__all__ = ["ToolOutput", "leashed", "run_tool", "tool_output", "tool_version"]

_SAID_LIMIT = 2000
_FULL = ("No space left on device", "Disk quota exceeded")


def leashed(argv: Sequence[str]) -> list[str]:
    """The command line that gets KILL when the thread that started it ends, so that a build that is killed leaves nobody at work."""
    for tool in ("setpriv", argv[0]):
        if shutil.which(tool) is None:
            raise Unsupported(f"{tool} is not installed on this host", cause="tool-missing", details={"tool": tool})
    return ["setpriv", "--pdeathsig", "KILL", "--", *argv]


def run_tool(argv: Sequence[str], *, name: str | None = None, environment: Mapping[str, str | None] | None = None) -> bytes:
    """Run to the end and return its stdout. DSecError with the end of its stderr if it fails, QuotaExceeded if the disk is full.

    `name` is what errors call it, where the first word is only a wrapper's. In `environment` None takes a variable away.
    """
    name = name or argv[0]
    variables = {**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})}
    done = subprocess.run(
        leashed(argv),
        env={key: value for key, value in variables.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-_SAID_LIMIT:]
        raise _failure(name, done.returncode, said)
    return done.stdout


def _failure(name: str, code: int, said: str) -> DSecError:
    if any(text in said for text in _FULL):
        return QuotaExceeded(f"the disk is full: {name}: {said}", cause="disk", ran="ran")
    return DSecError(f"{name} failed with {code}: {said}", cause="tool-failed", ran="ran")


class ToolOutput:
    """What a command writes while it runs. `read` is for one thread; `kill` for any."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process, self._stdout = process, process.stdout

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes as they come; b"" at the end."""
        return self._stdout.read1(size)  # type: ignore[attr-defined, no-any-return]

    def kill(self) -> None:
        """End it, if it has not ended; nobody then asks how."""
        self._process.kill()

    def finish(self) -> int:
        """Wait for its end; returns its exit code."""
        return self._process.wait()


@contextlib.contextmanager
def tool_output(argv: Sequence[str], *, name: str, work: Path, environment: Mapping[str, str] | None = None) -> Iterator[ToolOutput]:
    """Run a command for what it writes. At the end of the block it must have ended by itself, and well: else errors as of `run_tool`.

    Its stderr is kept in the folder `work` meanwhile.
    """
    with (work / f"{name}.log").open("w+b") as log:
        process = subprocess.Popen(
            leashed(argv),
            env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        output = ToolOutput(process)
        try:
            try:
                yield output
                failed = None
            except InvalidArgument as error:  # what it wrote is cut off: why, it says itself
                failed = error
            code = process.wait()
            if code != 0:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _SAID_LIMIT))
                raise _failure(name, code, log.read().decode(errors="replace").strip()) from failed
            if failed is not None:
                raise failed
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def tool_version(name: str) -> str:
    """The first line of what `NAME --version` says, for the record; empty if it says nothing."""
    with contextlib.suppress(DSecError):
        return run_tool([name, "--version"]).decode(errors="replace").partition("\n")[0].strip()
    return ""
