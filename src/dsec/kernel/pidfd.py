"""Processes by descriptor: what a pid cannot do, as it is used again."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from dsec.kernel.syscalls import fail, syscall

__all__ = ["get_descriptor", "has_ended", "open_process", "send_signal", "start_ticks"]


def open_process(pid: int, started_ticks: int | None = None) -> int | None:
    """A descriptor of the process; None if it is gone, or the pid is now that of one with another `start_ticks`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise fail(f"pidfd_open({pid})", error.errno or 0) from None
    # read after opening: if the pid was used again before, the time is another, and after it the descriptor is dead
    if started_ticks is not None and start_ticks(pid) != started_ticks:
        os.close(fd)
        return None
    return fd


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names a process for good. None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def send_signal(pidfd: int, number: int) -> bool:
    """False if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)
        return True
    return False


def has_ended(pidfd: int, timeout_seconds: float = 0.0) -> bool:
    """Whether the process is dead, a zombie included; waits for up to that long."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def get_descriptor(pidfd: int, number: int) -> int:
    """A duplicate of another process's open descriptor; needs the right to trace it."""
    return syscall("pidfd_getfd", pidfd, number, 0)
