"""Work on a store in a process of its own, which whoever waits for it can leave behind.

A thread would not do: the kernel lets nobody go whose request a FUSE server has, or one of Lustre or Ceph, not by KILL either, and a
process ends when the last of its threads has. So the work gets a process that holds nothing of the caller's, no pipe that somebody reads
to its end either. It dies by itself when its store is back; then its locks are free, and what it left in leased folders goes with the next
sweep.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

from dsec.environments.lifesigns import LifeSigns
from libdsec.errors import DSecError

__all__ = ["Apart", "Told"]

T = TypeVar("T")
Told = Callable[..., None]
"""`told(*values, key=None)` lets the caller know how far the work is. What comes often is left out at times, while `key` is the same."""

LONG: Final = 10
"""One call, an fsync of gigabytes, may take a store so many times the patience, as long as it answers others meanwhile."""
_LOOK_SECONDS: Final = 0.1
_TELL_SECONDS: Final = 0.05
_CLEANING_SECONDS: Final = 2.0
_STUCK_SECONDS: Final = 0.3
_PLACES: Final = ("", "layers", "packs", "tags", "building")


class Apart(Generic[T]):
    """`action(told)` in a process, begun at once; `result` waits for it. To be made while the caller has no other thread.

    `root` is where the store is, which is asked for a sign of life beside the work. Leaving the block ends the work if it has not ended.
    """

    def __init__(self, action: Callable[[Told], T], root: Path, *, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._reports, reports = Pipe(duplex=False)
        # the process reads it, and learns by its end that nobody waits any more
        wanted, self._wanted = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_apart(reports, wanted, action, partial(_ask, root, min(1.0, patience_seconds / 4)))
        reports.close()
        os.close(wanted)
        self._signs = LifeSigns(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end()
        finally:
            os.close(self._wanted)
            self._reports.close()

    def result(self, *, long_calls: bool = False, told: Told = lambda *_: None) -> T:
        """What the action returns, or raises. TimeoutError if the store does not answer and nothing has moved for the patience.

        With `long_calls` the work has some that a living store may take its time for. Reading and writing may take any time in all, and so
        may tools that the work runs, as long as the store answers.
        """
        silence, looked = _Silence(self._patience), False
        while True:
            # What has been reported and not yet heard may be that the store answers, or the end: all of it is heard before a judgement.
            if self._reports.poll(0.0 if looked else _LOOK_SECONDS):
                try:
                    report, *values = self._reports.recv()
                except EOFError:
                    raise self._died() from None
                match report:
                    case "done":
                        return values[0]  # type: ignore[no-any-return]
                    case "failed":
                        raise values[0]
                    case "told":
                        told(*values)
                    case "watchers":
                        self._signs.besides = values
                    case "answered":
                        silence.answered()
            elif looked:
                silence.judge(alone=not self._signs.has_children(), calls=LONG if long_calls else 1)
                looked = False
            if silence.due():
                silence.look(*self._signs.look())
                looked = True

    def _died(self) -> BaseException:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if os.WIFSIGNALED(status):
            return DSecError(f"the work was ended by signal {os.WTERMSIG(status)}", cause="killed", ran="unknown")
        return KeyboardInterrupt()

    def _end(self) -> None:
        """Politely first: it takes its folders away, as long as the store lets it."""
        self._signal(signal.SIGINT)
        began = idle_since = time.monotonic()
        while self.pid and not self._reaped():
            now = time.monotonic()
            if self._signs.look()[0]:
                idle_since = now
            if now - began > _CLEANING_SECONDS or now - idle_since > _STUCK_SECONDS:
                self._signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        began = time.monotonic()
        while self.pid and not self._reaped() and time.monotonic() - began < _STUCK_SECONDS:
            time.sleep(0.01)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid and not self._reaped():
            os.kill(self.pid, number)

    def _reaped(self) -> bool:
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid


class _Silence:
    """For how long what has not happened, by looks: a caller that is stopped (Ctrl-Z) and goes on counts no time that it was not there."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._looked = time.monotonic()
        self._unanswered = self._idle = self._unmoved = 0.0

    def answered(self) -> None:
        self._unanswered = 0.0

    def due(self) -> bool:
        return time.monotonic() - self._looked >= _LOOK_SECONDS

    def look(self, ran: bool, moved: bool) -> None:
        now = time.monotonic()
        passed = min(now - self._looked, 1.0)
        self._looked = now
        self._unanswered += passed
        self._idle = 0.0 if ran else self._idle + passed
        self._unmoved = 0.0 if moved else self._unmoved + passed

    def judge(self, *, alone: bool, calls: int) -> None:
        if min(self._unanswered, self._unmoved) >= self._patience:
            raise TimeoutError(f"the store did not answer within {self._patience:g} s")
        if alone and self._idle >= self._patience * calls:
            raise TimeoutError(f"the store did not answer within {self._patience * calls:g} s")


# -- in the process ------------------------------------------------------------------------------------------------------------------


def _be_apart(reports: Connection, wanted: int, action: Callable[[Told], Any], ask: Callable[[_Telling], None]) -> NoReturn:
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGINT, _once)
        _let_go_of_what_others_read({reports.fileno(), wanted})
        told = _Telling(reports)
        watchers = [
            threading.Thread(target=_end_when_unwanted, args=(wanted,), daemon=True),
            threading.Thread(target=ask, args=(told,), daemon=True),
        ]
        for thread in watchers:
            thread.start()
        told.send("watchers", *(thread.native_id for thread in watchers))
        try:
            told.send("done", action(told))
        except KeyboardInterrupt:
            pass
        except BaseException as error:
            told.send("failed", _portable(error))
    os._exit(0)


def _once(number: int, frame: object) -> None:
    """A terminal's Ctrl-C comes twice, from the terminal and from who waits; the second must not break off the cleaning up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _let_go_of_what_others_read(but: set[int]) -> None:
    """Left behind, it must keep nobody waiting for the end of what it never writes. Sources may be on what can only be read."""
    nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        # the one that listed the folder has gone meanwhile
        with contextlib.suppress(OSError):
            if fd <= 2 and (fd > 0 or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY):
                os.dup2(nothing, fd)
            elif fd > 2 and fd != nothing and fd not in but and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                os.close(fd)


def _end_when_unwanted(wanted: int) -> None:
    os.read(wanted, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _ask(root: Path, every_seconds: float, told: _Telling) -> None:
    """Names that nobody has asked for before: no cache knows them."""
    while True:
        for place in _PLACES:
            with contextlib.suppress(OSError):
                os.lstat(root / place / f".{secrets.token_hex(8)}")
            told.send("answered")
        time.sleep(every_seconds)


class _Telling:
    def __init__(self, reports: Connection) -> None:
        self._reports = reports
        self._lock = threading.Lock()
        self._told: tuple[float, object] = (0.0, None)

    def __call__(self, *values: object, key: object = None) -> None:
        now = time.monotonic()
        if now - self._told[0] >= _TELL_SECONDS or key != self._told[1]:
            self._told = now, key
            self.send("told", *values)

    def send(self, report: str, *values: object) -> None:
        with self._lock:
            self._reports.send((report, *values))


def _portable(error: BaseException) -> BaseException:
    if not isinstance(error, DSecError | OSError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DSecError(f"{type(error).__name__}: {error}", cause="internal", ran="unknown")
    return error
