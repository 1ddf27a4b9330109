"""Fixtures for all rooms, and the checks that are always on: leaks, blocking calls in the event loop, orphans."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import hashlib
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsec.resources.plan import instance_name
from dsec.testing import leaks

PROJECT = Path(__file__).resolve().parent.parent
CACHE = PROJECT / "build" / "test-cache"
LEAK_PATIENCE_SECONDS = float(os.environ.get("DSEC_TEST_LEAK_PATIENCE", "5"))
BLOCKING_SECONDS = 0.5

NODE_WIDE = os.environ.get("DSEC_TEST_EXCLUSIVE") == "1"
"""The tests are the only user of DSec on this machine, so whatever carries its name is theirs."""

_reaper_pid: int | None = None


# -- orphans ---------------------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Put a reaper above this process.

    Sandboxes outlive their daemons by design, so a test that kills an edge leaves orphans. With a subreaper they stay ours to find,
    and are reaped as an init would.
    """
    global _reaper_pid
    PR_SET_CHILD_SUBREAPER = 36
    if config.getoption("collectonly", False) or ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return
    reaper = os.getpid()
    child = os.fork()
    if child == 0:
        _reaper_pid = reaper
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        return
    os._exit(_reap_until(child))


def _reap_until(main: int) -> int:
    """Wait for every child until `main` is done; its exit code, or 128 + its signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda received, _frame: os.kill(main, received))
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == main:
            _end_descendants()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_descendants() -> None:
    """What tests left has been reported by now; it does not outlive the run."""
    deadline = time.monotonic() + 5
    while (left := list(leaks.children(os.getpid()))) and time.monotonic() < deadline:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# -- markers ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _registries_reachable() -> bool:
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tempfile.gettempdir() + "/dsec-probe", "iniconfig"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: run `sudo make test`")
    if item.get_closest_marker("network") and not _registries_reachable():
        pytest.skip("needs the package registries, which do not answer here")


# -- leaks -----------------------------------------------------------------------------------------------------------------------


def _await_no_leaks(before: leaks.Inventory, now: Callable[[], leaks.Inventory], allowed: tuple[str, ...] = ()) -> list[str]:
    """What is left after the patience; ending takes a moment (a thread that is told to stop, a lazy unmount)."""
    deadline = time.monotonic() + LEAK_PATIENCE_SECONDS
    pause = 0.002
    while left := [line for line in leaks.found(before, now()) if not (allowed and line.startswith(allowed))]:
        if time.monotonic() > deadline:
            return left
        gc.collect()
        time.sleep(pause)
        pause = min(0.1, pause * 2)
    return []


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves descriptors, threads or processes behind; kernel objects of an instance are `state_run`'s to check.

    What fixtures of a wider scope hold is there before and does not count. Where the tests have the machine for themselves, mounts,
    cgroups and network objects named after the project count wherever they are.
    """
    before = leaks.take(reaper_pid=_reaper_pid, node_wide=NODE_WIDE)
    yield
    marker = request.node.get_closest_marker("leaky")
    allowed = tuple(f"{kind}:" for kind in marker.args[0]) if marker else ()
    if left := _await_no_leaks(before, lambda: leaks.take(reaper_pid=_reaper_pid, node_wide=NODE_WIDE), allowed):
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


# -- blocking calls --------------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """What an event loop's thread is executing now."""

    native_id: int
    thread_id: int
    since: float
    handle: object


class _BlockingWatch:
    """Says where code of ours held an event loop for too long.

    It samples the stack of the loop's thread while a callback runs. Time in which the thread wanted to run and had no CPU is taken
    off, so that a busy machine is not mistaken for a blocking call.
    """

    def __init__(self) -> None:
        self.running: dict[int, _Running] = {}
        self.reports: list[str] = []
        original = asyncio.events.Handle._run
        running = self.running

        def timed_run(handle: Any) -> None:
            ident = threading.get_ident()
            running[ident] = _Running(threading.get_native_id(), ident, time.monotonic(), handle)
            try:
                original(handle)
            finally:
                running.pop(ident, None)

        asyncio.events.Handle._run = timed_run  # type: ignore[method-assign]
        thread = threading.Thread(target=self._watch, name="blocking-watch", daemon=True)
        thread.leak_exempt = True  # type: ignore[attr-defined]
        thread.start()

    def _watch(self) -> None:
        waited_before: dict[int, tuple[object, float]] = {}
        while True:
            time.sleep(BLOCKING_SECONDS / 5)
            seen: dict[int, tuple[object, float]] = {}
            for entry in list(self.running.values()):
                waited = _runqueue_seconds(entry.native_id)
                known = waited_before.get(entry.thread_id)
                first_waited = known[1] if known and known[0] is entry.handle else waited
                if first_waited is None or waited is None:
                    continue
                seen[entry.thread_id] = (entry.handle, first_waited)
                held = time.monotonic() - entry.since - (waited - first_waited)
                if held > BLOCKING_SECONDS and first_waited >= 0 and (place := _place_of_ours(entry.thread_id)):
                    self.reports.append(f"{place} held the event loop for over {held:.1f} s")
                    seen[entry.thread_id] = (entry.handle, -1.0)  # once a callback
            waited_before = seen


def _runqueue_seconds(native_id: int) -> float | None:
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return None


def _place_of_ours(thread_id: int) -> str | None:
    """`file:line` of the innermost frame of the project if that is in src/; what a test itself blocks on is its own affair."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PROJECT / "src"):
            return f"{path.relative_to(PROJECT)}:{frame.f_lineno} ({frame.f_code.co_name})"
        if path.is_relative_to(PROJECT / "tests"):
            return None
        frame = frame.f_back
    return None


@pytest.fixture(scope="session")
def _blocking_watch() -> _BlockingWatch:
    return _BlockingWatch()


@pytest.fixture(autouse=True)
def no_blocking_calls(_blocking_watch: _BlockingWatch) -> Iterator[None]:
    """Fail a test during which code under src/ held an event loop of this process."""
    _blocking_watch.reports.clear()
    yield
    if _blocking_watch.reports:
        pytest.fail("blocking calls:\n  " + "\n  ".join(dict.fromkeys(_blocking_watch.reports)), pytrace=False)


# -- folders and environments ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateRun:
    """The two folders of one instance. Their paths are short, since a Unix socket's may have 107 bytes."""

    state: Path
    run: Path

    @property
    def cgroup(self) -> str:
        return instance_name(self.run)


def _make_instance() -> Iterator[StateRun]:
    root = Path(tempfile.mkdtemp(prefix="dst-", dir="/tmp"))
    places = StateRun(root / "state", root / "run")
    places.state.mkdir(mode=0o700)
    places.run.mkdir(mode=0o700)
    try:
        yield places
        held = (f"{leaks.HELD_ELSEWHERE}:",)
        if left := _await_no_leaks(leaks.Inventory(), lambda: leaks.of_instances([places.state, places.run]), held):
            pytest.fail("the instance left behind:\n  " + "\n  ".join(left), pytrace=False)
    finally:
        _remove_instance(root, places)


def _remove_instance(root: Path, places: StateRun) -> None:
    """Undo what is left of an instance, so that one failed test does not fail those after it; what was left has been reported."""
    with open("/proc/self/mountinfo") as table:
        points = [point for line in table if (point := line.split(" ", 5)[4]).startswith(str(root) + "/")]
    for point in reversed(points):
        subprocess.run(["umount", "-l", point], check=False, capture_output=True)
    for parent in leaks.cgroup_hierarchies():
        for folder, _, _ in os.walk(parent / places.cgroup, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def state_run() -> Iterator[StateRun]:
    """A fresh state and run folder. Mounts, cgroups and loop devices that are left at the end are reported, then removed."""
    yield from _make_instance()


@pytest.fixture(scope="module")
def module_state_run() -> Iterator[StateRun]:
    """One for all tests of a module, for those that share a daemon."""
    yield from _make_instance()


@pytest.fixture
def linked_tree(tmp_path: Path) -> Path:
    """A folder in which `c`, `d` and `sub/f` are one file, which holds `data`."""
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "c").write_bytes(b"data")
    (source / "d").hardlink_to(source / "c")
    (source / "sub/f").hardlink_to(source / "c")
    return source


@pytest.fixture(scope="session")
def tiny_rootfs() -> Path:
    """A root folder of 2 MB with a static busybox: sh and its tools, /etc/passwd with root and a user `guest` (1000), /tmp. No bash.

    Cached in build/test-cache by what it is made of; not to be written to.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("needs busybox: apt-get install busybox-static")
    key = hashlib.sha256(Path(busybox).read_bytes() + inspect.getsource(_fill_tiny_rootfs).encode()).hexdigest()[:12]
    return _cached(f"tiny-{key}", functools.partial(_fill_tiny_rootfs, busybox))


def _cached(name: str, fill: Any) -> Path:
    """A folder of the cache; made beside and renamed, so that a run cut short or another at the same time leaves no half one."""
    target = CACHE / name
    if not target.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=CACHE, prefix=name + "."))
        try:
            fill(fresh)
            fresh.chmod(0o755)
            fresh.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def _fill_tiny_rootfs(busybox: str, root: Path) -> None:
    for folder in (
        "bin",
        "sbin",
        "etc",
        "dev",
        "proc",
        "sys",
        "tmp",
        "run",
        "root",
        "usr/bin",
        "usr/sbin",
        "var/tmp",
        "home/guest",
        "work",
    ):
        (root / folder).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    (root / "bin/busybox").chmod(0o755)
    for applet in subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nguest:x:1000:1000:guest:/home/guest:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nguest:x:1000:\nextra:x:1001:guest\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    for folder in ("tmp", "var/tmp"):
        (root / folder).chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(root / "home/guest", 1000, 1000)


@pytest.fixture(scope="session")
def tiny_store(tiny_rootfs: Path) -> Path:
    """A store of layers that holds `tiny_rootfs` as the base `tiny`. Cached like it; for the store of an instance, not to be added to."""

    def fill(store: Path) -> None:
        from dsec.environments import EnvironmentStore, build

        with tempfile.TemporaryDirectory(prefix="dst-build-") as folder:
            build(EnvironmentStore(Path(folder, "state"), Path(folder, "run"), store), "tiny", source=f"dir:{tiny_rootfs}")

    sources = b"".join(path.read_bytes() for path in sorted((PROJECT / "src/dsec/environments").glob("*.py")))
    return _cached(f"{tiny_rootfs.name}-store-{hashlib.sha256(sources).hexdigest()[:12]}", fill)


@dataclass(frozen=True)
class Node:
    """A running `dsec up`."""

    places: StateRun
    store: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"unix://{self.places.run}/dsec.sock"

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which the command `dsec` finds it."""
        return os.environ | {"DSEC_STATE": str(self.places.state), "DSEC_RUN": str(self.places.run), "DSEC_STORE": str(self.store)}

    def dsec(self, *arguments: str, stdin: bytes | None = None, timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        """Run the command against it."""
        command = [sys.executable, "-m", "dsec.cli", *arguments]
        return subprocess.run(command, env=self.environ, input=stdin, capture_output=True, timeout=timeout, check=False)


def _start_node(places: StateRun, store: Path, *options: str) -> Node:
    """`dsec up` on these folders, ready for requests."""
    log = places.run.parent / "up.log"
    command = [sys.executable, "-m", "dsec.cli", "up", "--log-level", "info", *options]
    environ = os.environ | {"DSEC_STATE": str(places.state), "DSEC_RUN": str(places.run), "DSEC_STORE": str(store)}
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    deadline = time.monotonic() + 30
    with socket.socket(socket.AF_UNIX) as probe:
        while True:
            with contextlib.suppress(OSError):
                probe.connect(str(places.run / "dsec.sock"))
                return Node(places, store, process, log)
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                pytest.fail(f"dsec up did not come up:\n{log.read_text()[-3000:]}")
            time.sleep(0.02)


@pytest.fixture(scope="session")
def start_node() -> Callable[..., Node]:
    """`start_node(places, store, *options)`: for tests that end the server themselves."""
    return _start_node


@pytest.fixture(scope="module")
def node(module_state_run: StateRun, tiny_store: Path) -> Iterator[Node]:
    """A server for the tests of a module, with the environment `tiny`. Each test stops its own sandboxes."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run `sudo make test`")
    started = _start_node(module_state_run, tiny_store)
    try:
        # What the server keeps once it is in use, its launcher, is there before a test looks for leaks.
        warmed = started.dsec("run", "tiny", "true")
        assert warmed.returncode == 0, f"{warmed.stderr.decode()}\n{started.log.read_text()[-3000:]}"
        yield started
    finally:
        started.process.terminate()
        started.process.wait(30)
        started.dsec("down")


@pytest.fixture(scope="session")
def debian_rootfs() -> Path:
    """A tar of a small Debian with bash and python3, for what busybox cannot show. Cached; needs the registries the first time."""
    packages = ["python3-minimal", "procps"]
    key = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    target = CACHE / f"debian-{key}.tar"
    if target.exists():
        return target
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("needs root and mmdebstrap to make a Debian root")
    if not _registries_reachable():
        pytest.skip("needs the package registries to make a Debian root, the first time")
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = CACHE / f"debian-{key}.{os.getpid()}.tar"
    command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(packages)}", "--quiet", "bookworm", str(partial)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        pytest.fail(f"mmdebstrap: {done.stderr[-2000:]}")
    partial.rename(target)
    return target
