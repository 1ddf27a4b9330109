"""Birth, pause, adoption and every kind of end; what failed half-way; that nothing is left."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path

import msgspec
import pytest

from dsec.backends.container.backend import ContainerBackend
from dsec.backends.container.frames import encode_fields
from dsec.backends.protocol import SandboxSpec
from dsec.environments import ScratchStore
from dsec.resources.hierarchies import probe
from dsec.resources.plan import instance_dirs, instance_name
from libdsec.errors import DSecError, InvalidArgument, OutcomeUnknown, SandboxFailed
from libdsec.schema import ContainerRunArgs, ExecRequest

pytestmark = pytest.mark.root


def aether_pid(box):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(box.channel.socket_path)
        return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def groups(home, sandbox_id):
    parents = instance_dirs(probe(), instance_name(home.run))
    return [Path(parent, sandbox_id) for parent in parents if os.path.exists(f"{parent}/{sandbox_id}")]


def traces(home, sandbox_id):
    """Every kernel object or file that carries the sandbox's id."""
    found = [str(path) for path in home.run.rglob(f"*{sandbox_id}*")]
    found += [str(path) for path in groups(home, sandbox_id)]
    found += [str(path) for path in (home.state / "scratch").glob(sandbox_id)]
    return found


# -- pause -------------------------------------------------------------------------------------------------------------------------------


async def test_a_paused_sandbox_stands_and_goes_on_after_resume(box, boxes, until):
    await box.channel.start("op-c", ExecRequest(shell="i=0; while :; do echo $i > /tmp/n; i=$((i+1)); done", background=True))
    await until(lambda: _number(box))
    await boxes.backend.pause(box.spec)
    files = await box.channel.files("root")
    opened = await files.open_read("/tmp/n")
    try:
        before = os.pread(opened.fd, 100, 0)
        cpu = (await boxes.backend.usage(box.spec)).cpu_seconds
        await asyncio.sleep(0.1)
        assert os.pread(opened.fd, 100, 0) == before
        assert (await boxes.backend.usage(box.spec)).cpu_seconds - cpu < 0.02
    finally:
        os.close(opened.fd)
        await files.aclose()
    await boxes.backend.resume(box.spec)
    first = await _number(box)
    await until(lambda: _differs(box, first))


async def _number(box):
    return (await box.sh("cat /tmp/n")).stdout.strip()


async def _differs(box, value):
    return (await _number(box)) not in (value, b"")


async def test_pausing_and_resuming_twice_is_fine(box, boxes):
    for _ in range(2):
        await boxes.backend.pause(box.spec)
    for _ in range(2):
        await boxes.backend.resume(box.spec)
    assert (await box.run("echo", "on")).stdout == b"on\n"


# -- ends --------------------------------------------------------------------------------------------------------------------------------


async def running(box, boxes):
    await box.channel.start("op", ExecRequest(shell="sleep 1000 & setsid sleep 1001", background=True))


async def paused(box, boxes):
    await running(box, boxes)
    await boxes.backend.pause(box.spec)


async def aether_dead(box, boxes):
    await running(box, boxes)
    os.kill(aether_pid(box), signal.SIGKILL)


async def aether_stopped(box, boxes):
    await running(box, boxes)
    os.kill(aether_pid(box), signal.SIGSTOP)


async def aether_stopped_with_a_full_backlog(box, boxes):
    await aether_stopped(box, boxes)
    await fill_backlog(box)


async def aether_dead_while_paused(box, boxes):
    await paused(box, boxes)
    os.kill(aether_pid(box), signal.SIGKILL)


async def init_dead(box, boxes):
    await running(box, boxes)
    kill_init(box)


async def already_destroyed(box, boxes):
    await boxes.backend.destroy(box.spec)


async def unread_stream(box, boxes):
    await box.channel.start("op", ExecRequest(argv=["yes"]))
    await box.channel.attach("op", credit=4096)


async def fill_backlog(box):
    """Until the kernel takes no more connections; they stay, also when they are hung up."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.connect(box.channel.socket_path)
            except BlockingIOError:
                return


def kill_init(box):
    """The sandbox's pid 1: the only process of its group that none inside is the parent of."""
    pids = [int(pid) for pid in (box.group() / "cgroup.procs").read_text().split()]
    for pid in pids:
        if Path(f"/proc/{pid}/status").read_text().split("NSpid:\t")[1].split("\n")[0].split()[-1] == "1":
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no init among {pids}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    [
        running,
        paused,
        aether_dead,
        aether_stopped,
        aether_stopped_with_a_full_backlog,
        aether_dead_while_paused,
        init_dead,
        already_destroyed,
        unread_stream,
    ],
    ids=lambda state: state.__name__,
)
async def test_destroy_leaves_nothing_in_whatever_state(boxes, home, until, state, monkeypatch):
    monkeypatch.setattr("dsec.backends.container.removal.STOP_SECONDS", 1.0)
    monkeypatch.setattr("dsec.backends.container.conversation.CONNECT_SECONDS", 0.5)
    box = await boxes()
    aether = aether_pid(box)
    await state(box, boxes)
    pids = inhabitants(home, box.spec.sandbox_id) | {aether, *children(aether)}
    async with asyncio.timeout(15):
        await boxes.backend.destroy(box.spec)
    assert traces(home, box.spec.sandbox_id) == []
    assert not alive(aether)
    await until(lambda: not any(map(alive, pids)), 2)
    await boxes.backend.destroy(box.spec)
    with pytest.raises(SandboxFailed) as caught:
        await box.run("true")
    assert (caught.value.cause, caught.value.ran) == ("channel-closed", "not-run")


def inhabitants(home, sandbox_id):
    """Every process in any group of the sandbox."""
    pids = set()
    for folder in groups(home, sandbox_id):
        for procs in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):  # a session's group may go meanwhile
                pids |= {int(pid) for pid in procs.read_text().split()}
    return pids


def children(pid):
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_wanted_end_reports_no_failure(box, boxes):
    await boxes.backend.destroy(box.spec)
    assert "closed" not in boxes.kinds(box.spec.sandbox_id)


async def test_a_command_under_way_ends_with_its_sandbox(box, boxes, until):
    task = asyncio.ensure_future(box.sh("sleep 1000"))
    await until(box.channel.sessions)
    async with asyncio.timeout(10):
        await boxes.backend.destroy(box.spec)
        with contextlib.suppress(SandboxFailed, OutcomeUnknown):
            assert (await task).signal == signal.SIGKILL


async def test_a_killed_aether_is_reported_and_ends_the_sandbox(box, boxes, until):
    task = asyncio.ensure_future(box.sh("touch /tmp/up; sleep 1000"))
    await until(lambda: _exists(box, "/tmp/up"))
    os.kill(aether_pid(box), signal.SIGKILL)
    with pytest.raises(SandboxFailed) as caught:
        await asyncio.wait_for(task, 10)
    assert (caught.value.cause, caught.value.ran) == ("channel-closed", "unknown")
    await until(lambda: "closed" in boxes.kinds(box.spec.sandbox_id))
    await until(lambda: not (box.group() / "cgroup.procs").read_text())


async def _exists(box, path):
    return (await box.sh(f"test -e {path}")).exit_code == 0


async def test_a_dead_init_is_reported(box, boxes, until):
    kill_init(box)
    await until(lambda: "init-died" in boxes.kinds(box.spec.sandbox_id))
    with pytest.raises(SandboxFailed):
        await box.run("true")


@pytest.mark.slow
async def test_an_oom_kill_is_in_the_result_and_the_sandbox_lives(boxes):
    box = await boxes(memory_limit_mb=32)
    result = await box.sh("head -c 200000000 /dev/zero | tail", timeout=30)
    assert result.oom
    assert (await boxes.backend.usage(box.spec)).oom_kills >= 1
    after = await box.run("echo", "alive")
    assert (after.stdout, after.oom) == (b"alive\n", False)


async def test_usage_is_read(box, boxes):
    await box.out("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
    usage = await boxes.backend.usage(box.spec)
    assert usage.memory_bytes > 0
    assert usage.memory_peak_bytes >= usage.memory_bytes // 2
    assert usage.cpu_seconds > 0
    assert usage.pids == 1


# -- adoption ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_another_edge_finds_the_sandbox_its_commands_and_their_results(home, until):
    first, second = home.backend(), home.backend()
    await first.open(lambda *_: None)
    spec = _spec(home, first)
    channel = await first.create(spec)
    task = asyncio.ensure_future(channel.exec("op-long", ExecRequest(shell="echo before; sleep 0.5; echo after")))
    await until(channel.sessions)
    await first.aclose()
    with pytest.raises(SandboxFailed):
        await task
    await second.open(lambda *_: None)
    try:
        channel = await second.adopt(spec)
        assert channel is not None
        [live] = await channel.sessions()
        assert (live.session_id, live.running) == ("op-long", True)
        assert (await channel.wait("op-long")).stdout == b"before\nafter\n"
        assert second.lease_range("new") != spec.range_index
    finally:
        await second.destroy(spec)
        await second.aclose()


async def test_a_dead_sandbox_or_another_generation_is_not_adopted(boxes, home):
    box = await boxes()
    second = home.backend()
    await second.open(lambda *_: None)
    try:
        assert await second.adopt(msgspec.structs.replace(box.spec, generation=2)) is None
        os.kill(aether_pid(box), signal.SIGKILL)
        assert await second.adopt(box.spec) is None
    finally:
        await second.aclose()


@pytest.mark.slow
async def test_a_sandbox_that_hangs_is_not_adopted_and_can_be_destroyed(boxes, home, until, monkeypatch):
    monkeypatch.setattr("dsec.backends.container.conversation.CONNECT_SECONDS", 0.2)
    box = await boxes()
    aether = aether_pid(box)
    await aether_stopped_with_a_full_backlog(box, boxes)
    pids = inhabitants(home, box.spec.sandbox_id) | children(aether)
    second = home.backend()
    await second.open(lambda *_: None)
    try:
        assert await second.adopt(box.spec) is None
        assert alive(aether)
        await second.destroy(box.spec)
        assert not alive(aether)
        await until(lambda: not any(map(alive, pids)), 2)
        assert traces(home, box.spec.sandbox_id) == []
    finally:
        await second.aclose()


async def test_an_adopted_paused_sandbox_can_be_destroyed(boxes, home):
    box = await boxes()
    await running(box, boxes)
    await boxes.backend.pause(box.spec)
    second = home.backend()
    await second.open(lambda *_: None)
    try:
        assert await second.adopt(box.spec) is not None
        await second.destroy(box.spec)
        assert traces(home, box.spec.sandbox_id) == []
    finally:
        await second.aclose()


# -- failures at birth -------------------------------------------------------------------------------------------------------------------


async def test_a_missing_layer_fails_the_birth_and_leaves_nothing(boxes, home):
    spec = boxes.spec(layers=["gone@sha256:" + "0" * 64])
    with pytest.raises(DSecError) as caught:
        await boxes.backend.create(spec)
    assert caught.value.ran in ("not-run", "unknown")
    assert traces(home, spec.sandbox_id) == []


async def test_a_bad_hostname_is_named_and_leaves_nothing(boxes, home):
    spec = boxes.spec(hostname="x" * 300)
    with pytest.raises(InvalidArgument) as caught:
        await boxes.backend.create(spec)
    assert caught.value.field == "hostname"
    assert traces(home, spec.sandbox_id) == []


async def test_a_missing_binary_says_how_to_build_it(home):
    backend = ContainerBackend(home.environments, ScratchStore(home.state, home.run), home.run, binary=home.run / "none")
    await backend.open(lambda *_: None)
    try:
        spec = _spec(home, backend)
        with pytest.raises(SandboxFailed, match="make -C native") as caught:
            await backend.create(spec)
        assert (caught.value.cause, caught.value.ran) == ("launch-failed", "not-run")
        assert traces(home, spec.sandbox_id) == []
    finally:
        await backend.aclose()


def _spec(home, backend):
    args = ContainerRunArgs(disk_limit_mb=64)
    return SandboxSpec(sandbox_id="sb-x", generation=1, args=args, layers=home.layers, range_index=backend.lease_range("sb-x"))


async def test_a_cancelled_birth_leaves_nothing(boxes, home):
    for delay in (0, 0.0005, 0.001, 0.002, 0.004):
        spec = boxes.spec()
        task = asyncio.ensure_future(boxes.backend.create(spec))
        await asyncio.sleep(delay)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            await boxes.backend.destroy(spec)
        assert traces(home, spec.sandbox_id) == []


async def test_the_launcher_is_started_again_after_it_died(boxes):
    first = await boxes()
    os.kill(boxes.backend._launcher.pid, signal.SIGKILL)
    second = await boxes()
    assert (await first.run("echo", "1")).stdout + (await second.run("echo", "2")).stdout == b"1\n2\n"


async def test_a_launcher_that_does_not_know_all_that_is_to_be_hidden_is_none(boxes, monkeypatch):
    monkeypatch.setattr("dsec.backends.container.wire.LAUNCH_VERSION", 1)
    os.kill(boxes.backend._launcher.pid, signal.SIGKILL)
    with pytest.raises(SandboxFailed, match="dies as it starts") as raised:
        await boxes()
    assert raised.value.ran == "not-run"
    assert "edge has version 1 of LAUNCH" in boxes.backend._launcher._log.read_text()


async def test_a_wish_that_the_launcher_does_not_know_is_refused(boxes, monkeypatch):
    monkeypatch.setattr("dsec.backends.container.birth._walls", lambda masked: encode_fields([(199, "/proc/new")]))
    with pytest.raises(InvalidArgument, match="LAUNCH field 199"):
        await boxes()


@pytest.mark.slow
async def test_births_under_way_survive_the_launchers_death(boxes):
    await boxes()
    births = [asyncio.ensure_future(boxes()) for _ in range(12)]
    await asyncio.sleep(0.003)
    os.kill(boxes.backend._launcher.pid, signal.SIGKILL)
    made = await asyncio.gather(*births)
    results = await asyncio.gather(*(box.run("echo", "ok") for box in made))
    assert [result.stdout for result in results] == [b"ok\n"] * 12


async def test_the_launcher_is_out_of_reach_of_the_terminal(boxes):
    await boxes()
    pid = boxes.backend._launcher.pid
    assert os.getsid(pid) == pid != os.getsid(0)


# -- leaks -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_many_births_and_ends_leave_nothing(boxes, home):
    warm = await boxes()
    await boxes.backend.destroy(warm.spec)

    def state():
        mounts = Path("/proc/self/mountinfo").read_text().count(str(home.run))
        return len(os.listdir("/proc/self/fd")), mounts, sorted(os.listdir(home.run / "sandboxes"))

    async def cycle():
        box = await boxes()
        assert (await box.sh("echo x > /f; sleep 1000 & cat /f")).stdout == b"x\n"
        await boxes.backend.destroy(box.spec)

    before = state()
    for _ in range(15):
        await asyncio.gather(*(cycle() for _ in range(4)))
    assert state() == before
    assert await boxes.backend.owned() == set()
    deadline = time.monotonic() + 5
    while (left := daemons(boxes)) - {boxes.backend._launcher.pid}:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.01)


def daemons(boxes):
    return {int(pid) for pid in Path(boxes.backend._cgroups.daemons_dir, "cgroup.procs").read_text().split()}


async def test_a_launcher_that_dies_as_it_starts_leaves_nobody_at_its_socket(boxes, until):
    launcher = boxes.backend._launcher
    await boxes()
    for delay in range(20):
        launcher._discard()
        await asyncio.to_thread(launcher._start)
        begun = time.perf_counter()
        while time.perf_counter() - begun < delay * 0.0001:
            pass
        os.kill(launcher.pid, signal.SIGKILL)
        await until(launcher.died)
    assert await (await boxes()).out("echo lives") == "lives\n"
