"""Packs are made in a process of their own, `python -m dsec.environments.packprocess`: what a sandbox wrote decides how much work they are.

There it keeps nobody from the interpreter, its memory has a bound, and whatever ends it ends nothing else. It is told what to do by a value
on its standard input and answers with one on its standard output; it dies with the thread that waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.environments.packing import Packed, PackPlan, StackLimits, pack_snapshot
from dsec.environments.store import LayerStore
from dsec.environments.tools import leashed
from libdsec.errors import DSecError, QuotaExceeded, error_from_wire

__all__ = ["PackDied", "PackJob", "PackProcess"]

_NICE: Final = 10
_SACRIFICED: Final = 500
"""Where the host runs out of memory, a pack goes before what cannot be done again."""
_SAID: Final = 2000


class PackJob(msgspec.Struct, kw_only=True, frozen=True):
    """What `pack_snapshot` is to be called with. `memory_bytes` bounds the process's address space."""

    state: str
    store: str
    upper: str
    mounts: list[str]
    plan: PackPlan
    limits: StackLimits
    memory_bytes: int


class _Outcome(msgspec.Struct, kw_only=True):
    packed: Packed | None = None
    error: dict[str, Any] = {}
    """As on the wire."""


class PackDied(Exception):
    """The process ended without an answer. Whether something was published is not known; doing it again does no harm."""


class PackProcess:
    """`run` in a thread that lives for as long, as the process dies with the thread; `kill` from any."""

    def __init__(self, job: PackJob) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def run(self) -> Packed:
        """Raises what `pack_snapshot` raises, QuotaExceeded(cause="memory") where the bound was met, PackDied."""
        module = [sys.executable, "-P", "-m", "dsec.environments.packprocess"]
        with self._lock:
            if self._killed:
                raise PackDied("it was not begun")
            # A session of its own: what a terminal sends to edge is not for it.
            self._process = subprocess.Popen(
                leashed(["nice", "-n", str(_NICE), *module]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        with self._process as process:
            try:
                answer, said = process.communicate(msgspec.msgpack.encode(self._job))
            except BaseException:
                process.kill()
                raise
        try:
            outcome = msgspec.msgpack.decode(answer, type=_Outcome)
        except msgspec.DecodeError:
            why = said.decode(errors="replace").strip()[-_SAID:]
            raise PackDied(f"it ended with {process.returncode}: {why}") from None
        if outcome.packed is None:
            raise error_from_wire(outcome.error, 0)
        return outcome.packed

    def kill(self) -> None:
        """End it, or do not begin it. Nothing of what it had not published stays, once somebody sweeps."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()


def _packed(job: PackJob) -> Packed:
    try:
        return pack_snapshot(
            Path(job.state), LayerStore(Path(job.store)), Path(job.upper), [Path(mount) for mount in job.mounts], job.plan, job.limits
        )
    except MemoryError:
        raise _too_large(job) from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise _too_large(job) from error
        raise


def _too_large(job: PackJob) -> QuotaExceeded:
    return QuotaExceeded(f"more files than can be packed in {job.memory_bytes >> 20} MiB of memory", cause="memory", ran="ran")


def main() -> None:
    """Read the job, do it, answer."""
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PackJob)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_SACRIFICED))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or job.memory_bytes < most:
        resource.setrlimit(resource.RLIMIT_AS, (job.memory_bytes, job.memory_bytes))
    try:
        outcome = _Outcome(packed=_packed(job))
    except DSecError as error:
        outcome = _Outcome(error=error.to_wire())
    except Exception as error:
        traceback.print_exc()
        outcome = _Outcome(error=DSecError(f"the pack failed: {error!r:.{_SAID}}", cause="pack", ran="ran").to_wire())
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcome))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
