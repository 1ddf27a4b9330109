"""The verifier's half that the tested code cannot touch: it runs the tests as another user and passes on what it saw.

Reads one JSON object from standard input (`plan` in verify.py), starts `child.py` without privileges, collects its report from a pipe and
prints one JSON line. It judges nothing: the verdict is reached outside, from what is printed here. The nonce never leaves this process
before the child is dead, so that nothing the child prints or guesses can pass for this line. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_REPORT = 1024 * 1024
MAX_LOG = 8 * 1024
NOBODY = 65534


def limit_child() -> None:
    """Runs between fork and exec. A test that fills the disk or forks without end must not take the supervisor along."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def start_child(plan: dict[str, Any], report: int, log: int) -> subprocess.Popen[bytes]:
    """`child.py` in a session of its own, as nobody where this process is root, with nothing inherited but the report's descriptor."""
    identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("child.py")), str(report)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"},
        pass_fds=[report],
        start_new_session=True,
        preexec_fn=limit_child,
        **identity,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps({key: plan[key] for key in ("token", "path", "modules")}).encode())
    child.stdin.close()
    return child


def collect(child: subprocess.Popen[bytes], report: int, seconds: float) -> tuple[bytes, bool, bool]:
    """The report until its end, the deadline or its cap; then whether the deadline passed and whether the cap was hit.

    The child's end is looked for too: a grandchild may hold the pipe open for ever.
    """
    deadline = time.monotonic() + seconds
    pidfd = os.pidfd_open(child.pid)
    collected = bytearray()
    ended = timed_out = False
    try:
        while len(collected) <= MAX_REPORT:
            wait = 0.2 if ended else deadline - time.monotonic()
            ready = select.select([report] if ended else [report, pidfd], [], [], max(wait, 0))[0]
            if not ready:
                timed_out = not ended
                break
            if report in ready:
                piece = os.read(report, 65536)
                if not piece:
                    break
                collected += piece
            elif pidfd in ready:
                ended = True
    finally:
        os.close(pidfd)
    return bytes(collected[:MAX_REPORT]), timed_out, len(collected) > MAX_REPORT


def end_child(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The child's status, None if it had to be killed."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> None:
    """Run the plan once."""
    plan = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        os.chmod(folder, 0o755)
        for name, text in plan["files"].items():
            Path(folder, name).write_text(text)
            os.chmod(Path(folder, name), 0o644)
        plan["path"] = [*plan["path"], folder]
        reader, writer = os.pipe()
        child = start_child(plan, writer, log.fileno())
        os.close(writer)
        report, timed_out, flooded = collect(child, reader, plan["seconds"])
        status = end_child(child, 0.0 if timed_out or flooded else 5.0)
        log.seek(0)
        outcome = {
            "nonce": plan["nonce"],
            "status": status,
            "timed_out": timed_out,
            "flooded": flooded,
            "other_user": os.geteuid() == 0,
            "report": report.decode(errors="replace"),
            "log": log.read(MAX_LOG).decode(errors="replace"),
        }
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
