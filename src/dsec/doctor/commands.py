"""Running other programs from a probe."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from dsec.doctor.probing import Absent

__all__ = ["first_line", "require", "run"]


def require(program: str) -> str:
    """Path of the program, in the folders of root's PATH too. Raises Absent."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin")
    if path is None:
        raise Absent(f"{program} is not installed")
    return path


def run(command: Sequence[str], *, stdin: str = "", may_fail: bool = False) -> str:
    """Its output. Raises Absent with the last line of what it said if it fails, unless it `may_fail`."""
    done = subprocess.run([require(command[0]), *command[1:]], input=stdin, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 and not may_fail:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Absent(f"{command[0]}: {said[-1] if said else f'exit {done.returncode}'}")
    return done.stdout or done.stderr


def first_line(command: Sequence[str]) -> str:
    """The first line of its output, where versions are. Some programs exit with 1 after it (mkfs.erofs -V)."""
    lines = run(command, may_fail=True).strip().splitlines()
    return lines[0] if lines else ""
