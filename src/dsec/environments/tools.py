"""Running the distribution's tools: they die with us, and their failure is a typed error with what they said."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from libdsec.errors import DSecError, QuotaExceeded, Unsupported

__all__ = ["leashed", "run_tool"]

_SAID_LIMIT = 2000
_FULL = ("No space left on device", "Disk quota exceeded")


def leashed(argv: Sequence[str]) -> list[str]:
    """The command line that gets KILL when the thread that started it ends, so that a build that is killed leaves nobody at work."""
    for tool in ("setpriv", argv[0]):
        if shutil.which(tool) is None:
            raise Unsupported(f"{tool} is not installed on this host", cause="tool-missing", details={"tool": tool})
    return ["setpriv", "--pdeathsig", "KILL", "--", *argv]


def run_tool(argv: Sequence[str], *, name: str | None = None, environment: Mapping[str, str] | None = None) -> bytes:
    """Run to the end and return its stdout. DSecError with the end of its stderr if it fails, QuotaExceeded if the disk is full.

    `name` is what errors call it, where the first word is only a wrapper's.
    """
    name = name or argv[0]
    done = subprocess.run(
        leashed(argv),
        env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-_SAID_LIMIT:]
        if any(text in said for text in _FULL):
            raise QuotaExceeded(f"the disk is full: {name}: {said}", cause="disk", ran="ran")
        raise DSecError(f"{name} failed with {done.returncode}: {said}", cause="tool-failed", ran="ran")
    return done.stdout
