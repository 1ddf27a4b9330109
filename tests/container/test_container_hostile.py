"""Guests that hinder us on purpose: deadlines and ends hold, and a neighbour notices nothing."""

import asyncio
import time

import pytest

from libdsec.errors import DSecError
from libdsec.schema import ExecRequest, ExecResult, SessionRequest, SessionRunRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]

PATIENCE_SECONDS = 20
"""For what ought to take one or two; without our doing it takes as long as the guest likes, or the host's lease-break-time of 45 s."""


@pytest.fixture
async def leased(box, mischief):
    """A program in the sandbox that no process can open, since one inside holds a lease on it."""
    await box.out("cp /bin/busybox /tmp/true")
    assert await mischief(box, "lease", "/tmp/true") == "ready"
    return "/tmp/true"


async def outcome(running) -> ExecResult | DSecError:
    """What became of a command, within the patience."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            return await running
        except DSecError as error:
            return error


def ended_by_us(end: ExecResult | DSecError) -> bool:
    return end.timed_out if isinstance(end, ExecResult) else end.code != DSecError.code


async def test_a_program_that_cannot_be_opened_does_not_outlast_its_deadline(box, leased):
    assert ended_by_us(await outcome(box.run(leased, timeout=1, kill_grace=0.2)))
    assert await box.out("echo on") == "on\n"


async def test_a_program_that_cannot_be_opened_does_not_hold_up_the_end(boxes, box, leased):
    stuck = asyncio.ensure_future(outcome(box.run(leased)))
    # A command that is sent after it is answered, so the first has reached its chronus too.
    assert await box.out("echo on") == "on\n"
    async with asyncio.timeout(PATIENCE_SECONDS):
        await boxes.backend.destroy(box.spec)
    assert ended_by_us(await stuck)


async def test_users_that_cannot_be_looked_up_hold_up_only_who_asks_for_them(box, mischief):
    await box.out("cp /etc/passwd /etc/passwd.new; mv /etc/passwd.new /etc/passwd")
    assert await mischief(box, "lease", "/etc/passwd") == "ready"
    end = await outcome(box.run("id", user="guest", timeout=1, kill_grace=0.2))
    assert isinstance(end, DSecError) or end.timed_out
    assert (await outcome(box.run("echo", "on", user="0"))).stdout == b"on\n"


@pytest.mark.parametrize("text", ["sleep 1000", "sleep 0.5; exit 7"], ids=["goes-on", "exits"])
async def test_a_command_that_is_traced_from_another_ends_in_time(boxes, box, mischief, text):
    """Linux gives the end of a traced process to its tracer first, and this one never asks for it."""
    op = box.op()
    await box.channel.start(op, ExecRequest(shell=f"echo $$ > /tmp/pid.new; mv /tmp/pid.new /tmp/pid; {text}", timeout=2, kill_grace=0.2))
    pid = (await box.out("while ! cat /tmp/pid 2>/dev/null; do sleep 0.01; done")).strip()
    assert await mischief(box, "trace", pid) == "ready"
    end = await outcome(box.channel.wait(op))
    assert isinstance(end, DSecError) or end.timed_out or end.exit_code == 7
    async with asyncio.timeout(PATIENCE_SECONDS):
        await boxes.backend.destroy(box.spec)


async def test_a_shell_session_that_is_traced_can_be_closed(box, mischief):
    await box.channel.open_session("ss", SessionRequest())
    pid = (await box.channel.run_in_session("ss", box.op(), SessionRunRequest(shell="echo $$"))).stdout.decode().strip()
    assert await mischief(box, "trace", pid) == "ready"
    async with asyncio.timeout(PATIENCE_SECONDS):
        await box.channel.close_session("ss")
    assert await box.out("echo on") == "on\n"


async def test_no_process_is_made_as_a_child_of_ours(box, mischief):
    assert await mischief(box, "sibling") == "Operation not permitted"


async def test_a_guest_takes_nothing_from_the_hosts_stock_of_asynchronous_io(box, mischief):
    assert await mischief(box, "aio") == "Function not implemented"


async def test_one_sandbox_cannot_take_all_terminals(boxes, mischief):
    greedy, other = await boxes(), await boxes()
    made = int(await mischief(greedy, "terminals", "200"))
    assert 8 <= made < 200
    result = await other.run("tty", tty=True)
    assert (result.exit_code, result.stdout) == (0, b"/dev/pts/0\r\n")


async def test_a_lock_on_stdin_stays_in_the_sandbox(boxes, mischief):
    assert [await mischief(await boxes(), "lock") for _ in range(2)] == ["ready"] * 2


async def test_a_lock_on_the_stdin_of_a_session_stays_in_the_sandbox(boxes, mischief):
    one, two = await boxes(), await boxes()
    assert await mischief(one, "lock") == "ready"
    await mischief(two, "aio")  # for the program to be there
    await two.channel.open_session("ss", SessionRequest())
    request = SessionRunRequest(shell="timeout 1 /root/mischief lock")
    assert (await two.channel.run_in_session("ss", two.op(), request)).stdout == b"ready\n"


async def test_what_ignores_the_first_signal_does_not_survive_a_timeout_in_a_session(box, until):
    await box.channel.open_session("ss", SessionRequest())
    request = SessionRunRequest(shell="X=kept; (trap '' TERM; exec sleep 1077) & sleep 1078", timeout=0.5, kill_grace=0.2)
    started = time.monotonic()
    result = await box.channel.run_in_session("ss", box.op(), request)
    assert result.timed_out
    assert time.monotonic() - started < PATIENCE_SECONDS

    async def gone():
        return await box.out("ps -o args | grep '[s]leep 107' || true") == ""

    await until(gone, 5)
    assert (await box.channel.run_in_session("ss", box.op(), SessionRunRequest(shell="echo $X"))).stdout == b"kept\n"
