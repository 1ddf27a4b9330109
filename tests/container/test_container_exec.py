"""One command at a time: its outcome, its time, its tree, its output, its user and folder."""

import asyncio
import hashlib
import signal
import time

import pytest

from libdsec.errors import Conflict, Denied, DSecError, InvalidArgument, NotFound
from libdsec.schema import ExecRequest

pytestmark = pytest.mark.root


# -- outcomes ----------------------------------------------------------------------------------------------------------------------------


async def test_output_and_exit_code_come_back(box):
    result = await box.sh("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.signal, result.stdout, result.stderr) == (7, None, b"out\n", b"err\n")
    assert result.wall_ms > 0
    assert result.peak_memory_bytes > 0


async def test_a_signal_is_not_an_exit_code(box):
    result = await box.sh("kill -SEGV $$")
    assert (result.exit_code, result.signal) == (None, signal.SIGSEGV)


async def test_arguments_never_meet_a_shell(box):
    result = await box.run("printf", "%s|", "a b", "$HOME", "`id`", "", "*", "ü\n")
    assert result.stdout == "a b|$HOME|`id`||*|ü\n|".encode()


async def test_nuls_lone_bytes_and_blank_lines_survive(box):
    result = await box.sh(r"printf '\000\377\n\n\nx\303'")
    assert result.stdout == b"\0\xff\n\n\nx\xc3"


async def test_shell_text_runs_in_sh_where_there_is_no_bash(box):
    assert await box.out("echo $0 $((6*7))") != ""


async def test_many_commands_at_once_keep_their_outputs_apart(box):
    results = await asyncio.gather(*(box.sh(f"echo {number}; exit {number % 3}") for number in range(24)))
    assert [(int(result.stdout), result.exit_code) for result in results] == [(number, number % 3) for number in range(24)]


async def test_the_end_of_a_command_is_told_only_where_nobody_took_its_result(boxes, until):
    box = await boxes()
    for number in range(3):
        await box.channel.exec(f"op-taken-{number}", ExecRequest(argv=["true"]))
        await box.channel.acknowledge(f"op-taken-{number}", f"op-taken-{number}")
    await box.channel.exec("op-left", ExecRequest(argv=["true"]))
    assert boxes.kinds(box.spec.sandbox_id) == []
    box.channel._results.pop("op-left").close()
    await until(lambda: boxes.kinds(box.spec.sandbox_id) == ["session-ended"])
    assert (await box.channel.wait("op-left")).exit_code == 0


async def test_an_op_id_runs_once_and_its_result_can_be_fetched_again(box):
    first = await box.channel.exec("op-x", ExecRequest(shell="echo once"))
    with pytest.raises(Conflict):
        await box.channel.exec("op-x", ExecRequest(shell="echo twice"))
    again = await box.channel.wait("op-x")
    assert (again.stdout, again.exit_code) == (first.stdout, 0)
    await box.channel.acknowledge("op-x", "op-x")
    await box.channel.acknowledge("op-x", "op-x")
    with pytest.raises(NotFound):
        await box.channel.wait("op-x")


# -- time and the process tree -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_timeout_keeps_the_output_so_far_and_kills_what_ignores_term(box):
    started = time.monotonic()
    result = await box.sh("trap '' TERM; echo early; sleep 60 & wait; sleep 60", timeout=0.3, kill_grace=0.3)
    assert result.timed_out
    assert result.signal == signal.SIGKILL
    assert result.exit_code is None
    assert result.stdout == b"early\n"
    assert time.monotonic() - started < 10


@pytest.mark.slow
async def test_a_timeout_lets_a_command_end_by_itself_within_the_grace(box):
    result = await box.sh("trap 'echo bye; exit 5' TERM; sleep 60 & wait", timeout=0.3, kill_grace=5)
    assert result.timed_out
    assert (result.exit_code, result.stdout) == (5, b"bye\n")


@pytest.mark.slow
async def test_a_timeout_kills_children_that_left_the_process_group(box, until):
    script = "setsid sleep 1001 & (setsid sh -c 'sleep 1002 & exit' &) ; sleep 1003"
    result = await box.sh(script, timeout=0.3, kill_grace=0.2)
    assert result.timed_out
    assert "100" not in await box.out("ps -o args | grep '[s]leep 100' || true")


async def test_the_leaders_exit_ends_the_call_though_a_grandchild_holds_the_pipe(box):
    started = time.monotonic()
    result = await box.sh("sleep 1000 & echo hi")
    assert (result.exit_code, result.stdout) == (0, b"hi\n")
    assert time.monotonic() - started < 5
    assert await box.out("ps -o args | grep '[s]leep 1000' || true") == ""


async def test_leaving_the_call_does_not_end_the_command(box, until):
    task = asyncio.create_task(box.channel.exec("op-long", ExecRequest(shell="echo begun; touch /tmp/begun; sleep 0.3; echo done")))
    await until(lambda: _succeeds(box, "test -e /tmp/begun"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    result = await box.channel.wait("op-long")
    assert result.stdout == b"begun\ndone\n"


async def _succeeds(box, text):
    return (await box.sh(text)).exit_code == 0


async def test_a_signal_reaches_the_leader_or_the_tree(box, until):
    await box.channel.start("op-a", ExecRequest(shell="trap 'echo caught; exit 3' USR1; touch /tmp/a; while :; do sleep 0.01; done"))
    await until(lambda: _succeeds(box, "test -e /tmp/a"))
    await box.channel.signal("op-a", signal.SIGUSR1, tree=False)
    assert (await box.channel.wait("op-a")).stdout == b"caught\n"
    await box.channel.start("op-b", ExecRequest(shell="sleep 1000 & sleep 1000"))
    await box.channel.signal("op-b", signal.SIGKILL, tree=True)
    assert (await box.channel.wait("op-b")).signal == signal.SIGKILL
    with pytest.raises(NotFound):
        await box.channel.signal("op-none", signal.SIGTERM, tree=False)


async def test_a_background_command_outlives_the_call_that_started_it(box):
    live = await box.channel.start("op-svc", ExecRequest(shell="sleep 1000", background=True))
    assert live.running
    assert live.background
    assert live.pid > 0
    [session] = [session for session in await box.channel.sessions() if session.session_id == "op-svc"]
    assert (session.kind, session.running, session.background) == ("command", True, True)


# -- output ------------------------------------------------------------------------------------------------------------------------------


async def test_head_and_tail_are_kept_up_to_the_cap_with_counts(box):
    result = await box.sh("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done", output_limit_bytes=4096)
    total = sum(len(f"line {number}\n") for number in range(20000))
    assert result.stdout_bytes == total
    assert len(result.stdout) <= 4096
    assert result.stdout_dropped == total - len(result.stdout)
    assert result.stdout.startswith(b"line 0\nline 1\n")
    assert result.stdout.endswith(b"line 19999\n")


async def test_output_below_the_cap_is_whole(box):
    result = await box.sh("head -c 3000000 /dev/zero | tr '\\0' x; head -c 100000 /dev/zero >&2")
    assert (len(result.stdout), result.stdout_dropped) == (3_000_000, 0)
    assert result.stdout.count(b"x") == 3_000_000
    assert result.stderr == bytes(100_000)


async def test_endless_output_stays_bounded_until_the_timeout(box):
    result = await box.run("yes", timeout=0.2, kill_grace=0.1, output_limit_bytes=65536)
    assert result.timed_out
    assert len(result.stdout) <= 65536
    assert result.stdout_dropped == result.stdout_bytes - len(result.stdout) > 0


# -- stdin -------------------------------------------------------------------------------------------------------------------------------


async def test_stdin_is_empty_unless_given(box):
    assert (await box.run("cat")).stdout == b""
    assert (await box.run("cat", stdin=b"a\0b")).stdout == b"a\0b"


@pytest.mark.slow
async def test_large_stdin_is_streamed(box):
    data = bytes(range(256)) * 20_000
    result = await box.run("md5sum", stdin=data)
    assert result.stdout.split()[0].decode() == hashlib.md5(data).hexdigest()


async def test_a_command_that_does_not_read_its_large_stdin_still_ends(box):
    result = await box.sh("exit 4", stdin=bytes(4 << 20))
    assert result.exit_code == 4


# -- folder, user, environment, limits ---------------------------------------------------------------------------------------------------


async def test_the_environment_merges_and_the_request_wins(boxes):
    box = await boxes(env={"A": "layer", "B": "layer"})
    assert await box.out("echo $A $B $C $HOME $USER", env={"B": "request", "C": "x=y"}) == "layer request x=y /root root\n"


async def test_cwd_and_user_as_asked(box):
    assert await box.out("pwd; id -u; id -g; id -G; echo $HOME", cwd="/tmp", user="guest") == "/tmp\n1000\n1000\n1000 1001\n/home/guest\n"
    assert await box.out("id -u; id -g", user="1000:1001") == "1000\n1001\n"


async def test_accounts_that_change_between_two_commands_are_looked_up_anew(box):
    """Also those of the same length, changed in place, back and forth, and through a link put in their place."""
    for uid in (1000, 1234, 1000, 4321):
        await box.out(f"sed -i 's/^guest:x:[0-9]*:/guest:x:{uid}:/' /etc/passwd")
        assert [await box.out("id -u", user="guest") for _ in range(3)] == [f"{uid}\n"] * 3
    await box.out("cp /etc/passwd /etc/other && sed -i 's/^guest:x:[0-9]*:/guest:x:1555:/' /etc/other && ln -sf other /etc/passwd")
    assert await box.out("id -u", user="guest") == "1555\n"
    await box.out("sed -i 's/^guest:x:[0-9]*:/guest:x:1556:/' /etc/other")
    assert await box.out("id -u", user="guest") == "1556\n"


async def test_the_sandboxes_own_defaults_hold(boxes):
    box = await boxes(user="guest", workdir="/home/guest", hostname="rocket")
    assert await box.out("id -un; pwd; hostname") == "guest\n/home/guest\nrocket\n"


async def test_a_default_folder_that_is_not_there_falls_back(boxes):
    box = await boxes(workdir="/not/there")
    assert await box.out("pwd") == "/\n"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"argv": ["true"], "cwd": "/not/there"}, "cwd"),
        ({"argv": ["true"], "cwd": "/etc/passwd"}, "cwd"),
        ({"argv": ["true"], "user": "nobody-here"}, "user"),
        ({"argv": []}, "argv"),
        ({"argv": [""]}, "argv"),
        ({"argv": ["true", "a\0b"]}, "argv"),
        ({"shell": "true\0"}, "shell"),
        ({"argv": ["true"], "env": {"A=B": "c"}}, "env"),
        ({"argv": ["true"], "timeout": -1.0}, "timeout"),
        ({"argv": ["not-a-program"]}, "argv"),
        ({"argv": ["/etc/passwd"]}, "argv"),
        ({"argv": ["true"], "rlimits": {"nosuch": [1, 1]}}, "rlimits"),
        ({"argv": ["true", "x" * (5 << 20)]}, "argv"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_requests_name_the_field_and_run_nothing(box, options, field):
    with pytest.raises(DSecError) as caught:
        await box.channel.exec("op-bad", ExecRequest(**options))
    assert isinstance(caught.value, (InvalidArgument, NotFound, Denied))
    assert (caught.value.field, caught.value.ran) == (field, "not-run")
    assert (await box.run("true")).exit_code == 0


async def test_resource_limits_of_a_command(box):
    assert await box.out("ulimit -n; ulimit -Hn", rlimits={"nofile": [100, 200]}) == "100\n200\n"


@pytest.mark.parametrize("count", [1000, 66_900, 150_000])
async def test_a_script_without_a_first_line_takes_as_many_arguments_as_any_program(box, count):
    await box.sh("printf 'echo $#' > /root/plain; chmod 755 /root/plain")
    assert (await box.run("/root/plain", *["a"] * count)).stdout == f"{count}\n".encode()
    assert await box.out("echo lives") == "lives\n"
