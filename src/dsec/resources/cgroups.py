"""The cgroup files of one instance: made, read, frozen, killed, removed. Blocking calls; those that may wait say so and belong in a thread.

Only folders below the instance's own are ever written or removed, but for one thing: on v2 the root's controllers are enabled for its
children where they are not, since no limit works otherwise. That adds accounting to the groups of others and takes nothing from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import select
import signal
import time
from typing import Final

from dsec.resources.hierarchies import WANTED, Hierarchies
from dsec.resources.plan import DAEMONS, CgroupPlan, Limits, instance_dirs, plan_cgroups
from libdsec.errors import DSecError, Unsupported

__all__ = ["CgroupDriver"]

FREEZE_SECONDS: Final = 10.0
REMOVE_SECONDS: Final = 5.0
RETIRE_SECONDS: Final = 1.0
DAEMONS_WEIGHT: Final = "900"
"""Of the daemons' group on v2; a sandbox has 100. All aethers and chronuses share it, and whoever asks a loaded host waits for them."""


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _delegate(folder: str, controller: str) -> bool:
    """Enable it for the folder's children; whether it is.

    The kernel refuses for a group with processes in it (a container's root) or with real-time tasks (cpu). The sandboxes then lack that
    limit, which is refused by name where it is asked for.
    """
    path = f"{folder}/cgroup.subtree_control"
    if controller in (_read(path) or "").split():
        return True
    try:
        _write(path, f"+{controller}")
    except OSError:
        return False
    return True


def _removed(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _number(path: str | None) -> int | None:
    text = _read(path) if path is not None else None
    return int(text) if text is not None and text.strip().isdigit() else None


def _line(path: str | None, name: str) -> int | None:
    """The number of the line `name N`."""
    text = _read(path) if path is not None else None
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return None


class CgroupDriver:
    """Cgroups of the instance `instance` in `hierarchies`."""

    def __init__(self, hierarchies: Hierarchies, instance: str) -> None:
        self.hierarchies = hierarchies
        self.instance = instance
        self._dirs = instance_dirs(hierarchies, instance)

    @property
    def daemons_dir(self) -> str | None:
        """Where the launcher goes, so that whatever ends edge's own group (a service manager) does not end the sandboxes."""
        return f"{self.hierarchies.v2}/{self.instance}/{DAEMONS}" if self.hierarchies.v2 is not None else None

    def prepare(self) -> None:
        """Make the instance's folders. Raises Unsupported where the host does not let us."""
        if not self._dirs:
            raise Unsupported("no cgroup hierarchy is mounted: neither v2 nor the v1 controllers cpu, memory, pids")
        try:
            for path in self._dirs:
                os.makedirs(path, exist_ok=True)
            if self.hierarchies.v2 is not None:
                self._prepare_v2(self.hierarchies.v2)
        except OSError as error:
            raise Unsupported(f"cgroups cannot be made: {error}") from error

    def _prepare_v2(self, root: str) -> None:
        own = f"{root}/{self.instance}"
        usable = [name for name in WANTED if name in self.hierarchies.v2_controllers and _delegate(root, name) and _delegate(own, name)]
        os.makedirs(f"{own}/{DAEMONS}", exist_ok=True)
        if "cpu" in usable:
            with contextlib.suppress(OSError):
                _write(f"{own}/{DAEMONS}/cpu.weight", DAEMONS_WEIGHT)
        refused = self.hierarchies.v2_controllers.intersection(WANTED).difference(usable)
        self.hierarchies = dataclasses.replace(
            self.hierarchies,
            v2_controllers=self.hierarchies.v2_controllers - refused,
            v2_swap=os.path.exists(f"{own}/memory.swap.max"),
        )

    def retire(self) -> None:
        """Remove the instance's folders if nothing lives in them. Where no sandbox is left, processes on their way out are waited for, a
        second at most."""
        deadline = time.monotonic() + (0.0 if self.owned() else RETIRE_SECONDS)
        for path in (*((self.daemons_dir,) if self.daemons_dir else ()), *self._dirs):
            while not _removed(path) and time.monotonic() < deadline:
                time.sleep(0.005)

    def plan(self, sandbox: str, limits: Limits) -> CgroupPlan:
        return plan_cgroups(self.hierarchies, self.instance, sandbox, limits)

    def owned(self) -> set[str]:
        """Sandboxes of which there is a group."""
        found: set[str] = set()
        for path in self._dirs:
            with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
                found.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        found.discard(DAEMONS)
        return found

    def memory(self, sandbox: str) -> tuple[int | None, int | None, int]:
        """(used now, peak, OOM kills)."""
        plan = self.plan(sandbox, Limits())
        return _number(plan.memory_usage_file), _number(plan.memory_peak_file), _line(plan.oom_file, "oom_kill") or 0

    def cpu_seconds(self, sandbox: str) -> float | None:
        path = self.plan(sandbox, Limits()).cpu_usage_file
        if path is not None and path.endswith("cpu.stat"):
            microseconds = _line(path, "usage_usec")
            return None if microseconds is None else microseconds / 1e6
        nanoseconds = _number(path)
        return None if nanoseconds is None else nanoseconds / 1e9

    def pids(self, sandbox: str) -> int | None:
        return _number(self.plan(sandbox, Limits()).pids_file)

    def frozen(self, sandbox: str) -> bool:
        path = self.plan(sandbox, Limits()).freeze_file
        return path is not None and (_read(path) or "").strip() in ("1", "FREEZING", "FROZEN")

    def freeze(self, sandbox: str) -> None:
        """Stop every process of it. Waits until they stand; thaws again and raises if they do not within a bound."""
        path = self._freezer(sandbox)
        if path.endswith("cgroup.freeze"):
            _write(path, "1")
            stands = _await_line(f"{os.path.dirname(path)}/cgroup.events", "frozen", 1, FREEZE_SECONDS)
        else:
            _write(path, "FROZEN")
            stands = _await_text(path, "FROZEN", FREEZE_SECONDS)
        if not stands:
            self.thaw(sandbox)
            raise DSecError(f"{sandbox} did not freeze within {FREEZE_SECONDS:.0f} s; it runs on", ran="not-run")

    def thaw(self, sandbox: str) -> None:
        """Let it run again. Harmless if it does."""
        path = self._freezer(sandbox)
        with contextlib.suppress(FileNotFoundError):
            _write(path, "0" if path.endswith("cgroup.freeze") else "THAWED")

    def _freezer(self, sandbox: str) -> str:
        path = self.plan(sandbox, Limits()).freeze_file
        if path is None:
            raise Unsupported("this host has no cgroup freezer")
        return path

    def kill(self, sandbox: str) -> None:
        """SIGKILL to every process of it, in whatever state it is. May wait a little."""
        plan = self.plan(sandbox, Limits())
        if plan.v2 is not None:
            try:
                _write(f"{plan.v2}/cgroup.kill", "1")
                return
            except FileNotFoundError:
                # No such group (nothing to kill) or a kernel before 5.14.
                pass
        # A process that is frozen by v1 does not die before it is thawed, and one that forks between two rounds needs a third.
        deadline = time.monotonic() + REMOVE_SECONDS
        while (pids := self._members(plan)) and time.monotonic() < deadline:
            for pid in pids:
                _kill(pid)
            if plan.freeze_file is not None:
                self.thaw(sandbox)
            time.sleep(0.005)

    def _members(self, plan: CgroupPlan) -> set[int]:
        pids: set[int] = set()
        for top in plan.dirs:
            for folder, _, _ in os.walk(top):
                pids.update(int(line) for line in (_read(f"{folder}/cgroup.procs") or "").split())
        pids.discard(0)
        return pids

    def remove(self, sandbox: str) -> None:
        """Remove its groups, retrying while the kernel still counts dying processes. Raises naming what is left. May wait."""
        deadline = time.monotonic() + REMOVE_SECONDS
        pause = 0.001
        while left := [path for path in (f"{parent}/{sandbox}" for parent in self._dirs) if not _remove_tree(path)]:
            if time.monotonic() > deadline:
                pids = sorted(self._members(self.plan(sandbox, Limits())))
                raise DSecError(f"cgroups of {sandbox} stay: {', '.join(left)}; processes in them: {pids or 'none'}", ran="ran")
            time.sleep(pause)
            pause = min(pause * 2, 0.1)


def _kill(pid: int) -> None:
    # By descriptor: a pid that is read from a file may be another process's by the time it is signalled.
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def _remove_tree(top: str) -> bool:
    try:
        os.rmdir(top)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    else:
        return True
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(folder)
        except OSError as error:
            if error.errno != errno.ENOENT:
                return False
    return True


def _await_line(path: str, name: str, value: int, seconds: float) -> bool:
    """Until the line `name value` is in a file that the kernel notifies of (cgroup.events)."""
    deadline = time.monotonic() + seconds
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLPRI)
        while True:
            text = os.pread(fd, 4096, 0).decode()
            if f"{name} {value}" in text.splitlines():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poll.poll(left * 1000)
    finally:
        os.close(fd)


def _await_text(path: str, text: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (_read(path) or "").strip() != text:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
