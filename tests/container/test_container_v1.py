"""The same sandbox on a host that has v1 hierarchies alone: its freezer pauses, and sessions die without cgroup.kill."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from dsec.backends.protocol import SandboxSpec
from dsec.resources.hierarchies import Hierarchies, parse_mountinfo, probe
from libdsec.schema import ContainerRunArgs, ExecRequest

pytestmark = pytest.mark.root


@pytest.fixture
def v1_alone(monkeypatch):
    """This host without its v2 hierarchy."""
    _, v1 = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    if not {"cpu", "memory", "pids", "freezer"} <= set(v1):
        pytest.skip("this host has no v1 hierarchies")
    here = dataclasses.replace(probe(), v2=None, v2_controllers=frozenset(), v1=v1)
    assert isinstance(here, Hierarchies)
    monkeypatch.setattr("dsec.backends.container.backend.probe", lambda: here)


@pytest.fixture
async def channel_and_backend(v1_alone, home):
    backend = home.backend()
    await backend.open(lambda *_: None)
    spec = SandboxSpec(
        sandbox_id="sb-v1",
        generation=1,
        args=ContainerRunArgs(memory_limit_mb=64, cpu_cores_limit=1, pids_limit=64, disk_limit_mb=64),
        layers=home.layers,
        range_index=backend.lease_range("sb-v1"),
    )
    try:
        yield await backend.create(spec), backend, spec
        await backend.destroy(spec)
        assert backend._cgroups.owned() == set()
    finally:
        await backend.destroy(spec)
        await backend.aclose()


async def test_commands_run_within_their_limits(channel_and_backend):
    channel, backend, spec = channel_and_backend
    result = await channel.exec("op", ExecRequest(shell="cat /proc/self/cgroup; exit 3"))
    assert result.exit_code == 3
    memory = next(path for path in backend._cgroups._dirs if "memory" in path)
    with os.fdopen(os.open(f"{memory}/sb-v1/memory.limit_in_bytes", os.O_RDONLY)) as file:
        assert file.read() == f"{64 << 20}\n"
    assert (await backend.usage(spec)).pids == 1


@pytest.mark.slow
async def test_a_timeout_takes_the_whole_tree(channel_and_backend):
    channel, _, _ = channel_and_backend
    started = time.monotonic()
    script = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; sleep 1001') & sleep 1002; sleep 1003"
    result = await channel.exec("op", ExecRequest(shell=script, timeout=0.3, kill_grace=0.2))
    assert (result.timed_out, result.signal) == (True, signal.SIGKILL)
    assert time.monotonic() - started < 10
    left = await channel.exec("op2", ExecRequest(shell="ps -o args | grep '[s]leep 100'"))
    assert left.stdout == b""


@pytest.mark.slow
async def test_a_paused_sandbox_is_destroyed(channel_and_backend):
    channel, backend, spec = channel_and_backend
    await channel.start("op", ExecRequest(shell="sleep 1000", background=True))
    await backend.pause(spec)
    assert backend._cgroups.frozen("sb-v1")
    await backend.resume(spec)
    assert (await channel.exec("op2", ExecRequest(argv=["echo", "on"]))).stdout == b"on\n"
    await backend.pause(spec)
    await backend.destroy(spec)
