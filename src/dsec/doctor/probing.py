"""What a probe is, and how one is run: in a child of its own with a deadline, so that it can change its namespaces, hang or crash.

A probe gets a folder of its own. What it mounts, it mounts in a mount namespace of its own; both are gone after it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

__all__ = ["Absent", "Finding", "Probe", "run_probe"]

DEADLINE_SECONDS = 2.0
REPORT_MAX = 4096


class Absent(Exception):
    """The mechanism is not there; the text says what was seen."""


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """What a probe found. `detail` is what was seen, in words."""

    mechanism: str
    present: bool
    required: bool
    detail: str
    used_for: str
    without: str
    remedy: str
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Probe:
    """`run` tries the mechanism and returns what it saw; Absent or OSError mean that it is not there."""

    mechanism: str
    run: Callable[[Path], str]
    used_for: str
    without: str
    remedy: str
    required: bool = False


def run_probe(probe: Probe) -> Finding:
    """Try it in a child. A child that does not end in time is killed and counts as absent."""
    started = time.monotonic()
    folder = tempfile.mkdtemp(prefix="dsec-doctor-")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _attempt(probe, Path(folder), writer)
    os.close(writer)
    try:
        present, detail = _outcome(pid, reader)
    finally:
        os.close(reader)
        shutil.rmtree(folder, ignore_errors=True)
    return Finding(
        mechanism=probe.mechanism,
        present=present,
        required=probe.required,
        detail=detail,
        used_for=probe.used_for,
        without=probe.without,
        remedy="" if present else probe.remedy,
        milliseconds=round((time.monotonic() - started) * 1e3, 1),
    )


def _attempt(probe: Probe, folder: Path, writer: int) -> None:
    """The child's whole life. Nothing of the parent's may run here: no atexit, no flush."""
    try:
        # A group of its own, so that commands that a probe runs end with it at the deadline.
        os.setpgid(0, 0)
        try:
            report = "+" + probe.run(folder)
        except Absent as error:
            report = f"-{error}"
        except OSError as error:
            report = f"-{error.filename or ''}{': ' if error.filename else ''}{error.strerror or error}"
        except Exception as error:
            report = f"-the probe failed: {error!r}"
        os.write(writer, report.encode(errors="replace")[:REPORT_MAX])
    finally:
        os._exit(0)


def _outcome(pid: int, reader: int) -> tuple[bool, str]:
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    ready = poll.poll(DEADLINE_SECONDS * 1000)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    report = os.read(reader, REPORT_MAX).decode(errors="replace") if ready else ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if report:
        return report[0] == "+", report[1:]
    return False, f"no answer in {DEADLINE_SECONDS:g} s" if not ready else f"the probe died (status {status})"
