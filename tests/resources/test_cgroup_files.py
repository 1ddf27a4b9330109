"""The driver against the kernel's own cgroup files, in groups of this test alone."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from dsec.resources.cgroups import CgroupDriver
from dsec.resources.hierarchies import probe
from dsec.resources.plan import Limits, instance_name
from libdsec.errors import DSecError

pytestmark = pytest.mark.root


@pytest.fixture
def driver(tmp_path):
    driver = CgroupDriver(probe(), instance_name(tmp_path))
    driver.prepare()
    yield driver
    for sandbox in driver.owned():
        driver.thaw(sandbox)
        driver.kill(sandbox)
        driver.remove(sandbox)
    driver.retire()
    assert not any(os.path.exists(path) for path in driver._dirs)


@contextlib.contextmanager
def inhabitant(driver, sandbox, limits, *command):
    """A process in the sandbox's groups, made as aether makes them."""
    plan = driver.plan(sandbox, limits)
    for path in plan.dirs:
        os.makedirs(path, exist_ok=True)
    for path, value in plan.writes:
        with open(path, "w") as file:
            file.write(value)
    joins = [*plan.joins, *([f"{plan.v2}/cgroup.procs"] if plan.v2 else [])]
    script = 'for f in "$@"; do echo $$ > "$f"; done; read go; shift $#; eval "exec $COMMAND"'
    process = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *joins], env={"COMMAND": " ".join(command), "PATH": os.environ["PATH"]}, stdin=subprocess.PIPE
    )
    try:
        process.stdin.write(b"go\n")
        process.stdin.flush()
        wait_until(lambda: process.poll() is not None or all(is_in(process.pid, path) for path in plan.dirs))
        yield process
    finally:
        process.kill()
        driver.thaw(sandbox)
        process.wait()
        process.stdin.close()


def is_in(pid, folder):
    with open(f"{folder}/cgroup.procs") as file:
        return str(pid) in file.read().split()


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def test_limits_are_what_the_kernel_says_afterwards(driver):
    limits = Limits(cpu_cores=0.5, memory_bytes=64 << 20, pids=33)
    with inhabitant(driver, "sb", limits, "sleep", "60"):
        for path, value in driver.plan("sb", limits).writes:
            with open(path) as file:
                assert file.read().strip() == value


@pytest.mark.slow
def test_retiring_waits_for_a_daemon_that_is_on_its_way_out(driver):
    if driver.daemons_dir is None:
        pytest.skip("daemons have a group of their own only where there is a v2 hierarchy")
    with subprocess.Popen(["sleep", "0.3"]) as leaving:
        with open(f"{driver.daemons_dir}/cgroup.procs", "w") as file:
            file.write(str(leaving.pid))
        driver.retire()
        assert not os.path.exists(driver.daemons_dir)


@pytest.mark.slow
def test_a_frozen_process_stands_and_a_thawed_one_ends(driver):
    with inhabitant(driver, "sb", Limits(), "sleep", "0.5") as process:
        assert not driver.frozen("sb")
        driver.freeze("sb")
        assert driver.frozen("sb")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        driver.thaw("sb")
        assert process.wait(5) == 0


def test_kill_ends_a_frozen_group(driver):
    with inhabitant(driver, "sb", Limits(), "sleep", "60") as process:
        driver.freeze("sb")
        driver.kill("sb")
        driver.thaw("sb")
        assert process.wait(5) == -signal.SIGKILL


def test_removal_names_what_stays_and_succeeds_once_it_is_gone(driver, monkeypatch):
    monkeypatch.setattr("dsec.resources.cgroups.REMOVE_SECONDS", 0.05)
    with inhabitant(driver, "sb", Limits(), "sleep", "60") as process:
        with pytest.raises(DSecError, match=rf"\[{process.pid}\]"):
            driver.remove("sb")
        driver.kill("sb")
        process.wait(5)
    monkeypatch.undo()
    driver.remove("sb")
    assert driver.owned() == set()


def test_removal_takes_the_groups_of_sessions_along(driver):
    with inhabitant(driver, "sb", Limits(), "true") as process:
        process.wait(5)
    for path in driver.plan("sb", Limits()).dirs:
        os.makedirs(f"{path}/s-one/deeper")
    driver.remove("sb")
    assert driver.owned() == set()


@pytest.mark.slow
def test_an_oom_kill_is_counted_and_memory_and_cpu_are_read(driver):
    code = "import os; b = bytearray(os.urandom(1 << 20)) * 200; print(len(b))"
    with inhabitant(driver, "sb", Limits(memory_bytes=32 << 20), sys.executable, "-c", f"'{code}'") as process:
        assert process.wait(20) == -signal.SIGKILL
        _, peak, kills = driver.memory("sb")
    assert kills == 1
    assert peak >= 16 << 20
    assert driver.cpu_seconds("sb") > 0


def test_removing_what_is_not_there_is_fine(driver):
    driver.remove("never")
    driver.kill("never")
    driver.thaw("never")
    assert driver.memory("never") == (None, None, 0)
