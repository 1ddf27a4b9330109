"""Commands: how they end, what they see, what they leave."""

from __future__ import annotations

import asyncio
import time

from dsec.testing.trial import Trial, check, equal, holds, refused
from libdsec.errors import InvalidArgument, NotFound

__all__ = ["processes"]

LONG = "987.25"
"""Seconds of a sleep that is told from all others."""


async def processes(trial: Trial) -> list[str]:
    """Command lines of all processes of the shared sandbox."""
    listing = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null"
    return [line.strip() for line in (await trial.shell(listing)).splitlines() if line.strip()]


@check()
async def a_sandbox_comes_up(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        info = await sandbox.info()
        equal(info.state, "running", "state")
        equal(info.generation, 1, "generation")
        holds(
            info.environment and all("@sha256:" in layer for layer in info.environment), f"layers carry their digests: {info.environment}"
        )


@check()
async def exit_codes_are_reported(trial: Trial) -> None:
    for code in (0, 1, 7, 255):
        equal((await trial.shared.run_shell(f"exit {code}")).exit_code, code, "exit code")


@check()
async def a_signal_is_not_an_exit_code(trial: Trial) -> None:
    result = await trial.shared.run_shell("kill -9 $$")
    equal((result.exit_code, result.signal), (None, 9), "exit code and signal")


@check()
async def stdout_and_stderr_are_apart(trial: Trial) -> None:
    result = await trial.shared.run_shell("echo out; echo err >&2")
    equal((result.stdout, result.stderr), (b"out\n", b"err\n"), "streams")


@check()
async def output_is_bytes(trial: Trial) -> None:
    result = await trial.shared.run_shell(r"printf 'a\000b\377\n\n\n'")
    equal(result.stdout, b"a\0b\xff\n\n\n", "stdout")


@check()
async def long_output_keeps_head_and_tail(trial: Trial) -> None:
    limit = 65536
    result = await trial.shared.run_shell("printf START; head -c 1000000 /dev/zero | tr '\\0' x; printf END", output_limit_bytes=limit)
    equal(result.stdout_bytes, 1000008, "bytes written")
    equal(result.stdout_dropped, 1000008 - len(result.stdout), "bytes dropped")
    holds(0 < len(result.stdout) <= limit, f"{len(result.stdout)} bytes are kept of a limit of {limit}")
    holds(result.stdout.startswith(b"START") and result.stdout.endswith(b"END"), "head and tail are kept")


@check()
async def stdin_is_empty_unless_given(trial: Trial) -> None:
    equal((await trial.shared.run_shell("cat", timeout=10)).stdout, b"", "cat of nothing")
    data = bytes(range(256)) * 4096
    equal((await trial.shared.run_shell("cat", stdin=data)).stdout, data, "cat of 1 MiB")


@check()
async def arguments_never_meet_a_shell(trial: Trial) -> None:
    words = ["$HOME", "a;b", "*", "", "two words", "ü\t'\""]
    result = await trial.shared.exec(["printf", "%s\\n", *words])
    equal(result.stdout.decode(), "".join(f"{word}\n" for word in words), "arguments")


@check()
async def a_timeout_ends_the_whole_tree(trial: Trial) -> None:
    started = time.monotonic()
    result = await trial.shared.run_shell(f"echo before; setsid sleep {LONG} & sleep {LONG}", timeout=0.5, kill_grace=0.5)
    holds(time.monotonic() - started < 5, "it ends soon after its time")
    holds(result.timed_out, "the result says timed_out")
    equal(result.stdout, b"before\n", "output so far")
    left = [line for line in await processes(trial) if LONG in line]
    equal(left, [], "processes left of it")


@check()
async def what_ignores_term_is_killed(trial: Trial) -> None:
    result = await trial.shared.run_shell("trap '' TERM; while :; do sleep 0.1; done", timeout=0.3, kill_grace=0.3)
    holds(result.timed_out, "the result says timed_out")


@check()
async def a_child_that_holds_the_pipe_delays_nothing(trial: Trial) -> None:
    started = time.monotonic()
    result = await trial.shared.run_shell(f"sleep {LONG} & echo hi")
    holds(time.monotonic() - started < 5, f"it answered after {time.monotonic() - started:.1f} s")
    equal((result.exit_code, result.stdout), (0, b"hi\n"), "outcome")
    left = [line for line in await processes(trial) if LONG in line]
    equal(left, [], "processes left of it")


@check()
async def the_environment_has_its_precedence(trial: Trial) -> None:
    async with trial.sandbox(env={"A": "sandbox", "B": "sandbox"}) as sandbox:
        result = await sandbox.run_shell(
            'echo $A $B $C; echo $HOME $USER $LOGNAME; test -n "$PATH" && echo path', env={"B": "command", "C": "command"}
        )
        lines = result.stdout.decode().splitlines()
        equal(lines[0], "sandbox command command", "sandbox's, then the command's own")
        equal(lines[1:], ["/root root root", "path"], "what is always set")


@check()
async def working_directory_and_user_are_honoured(trial: Trial) -> None:
    equal((await trial.shell("pwd", cwd="/tmp")).strip(), "/tmp", "cwd")
    equal((await trial.shell("id -u; id -g", user="1000:1001")).split(), ["1000", "1001"], "uid and gid")


@check()
async def bad_requests_are_refused_by_name(trial: Trial) -> None:
    shared = trial.shared
    await refused(shared.run_shell("true", cwd="/no/such/folder"), InvalidArgument, NotFound, field="cwd")
    await refused(shared.run_shell("true", user="nobody-of-that-name"), InvalidArgument, NotFound, field="user")
    await refused(shared.exec([]), InvalidArgument, field="argv")
    await refused(shared.exec(["echo", "a\0b"]), InvalidArgument, field="argv")
    await refused(shared.run_shell("true", timeout=-1), InvalidArgument, field="timeout")


@check()
async def a_program_that_is_not_there_is_told(trial: Trial) -> None:
    try:
        result = await trial.shared.exec(["/no/such/program"])
    except (NotFound, InvalidArgument) as error:
        equal(error.ran, "not-run", "ran")
    else:
        holds(result.exit_code in (126, 127), f"exit code {result.exit_code}")


@check()
async def an_operation_runs_once(trial: Trial) -> None:
    op_id = f"once-{time.time_ns()}"
    command = "echo ran >>/tmp/once; wc -l </tmp/once"
    first = await trial.shared.run_shell(command, op_id=op_id)
    second = await trial.shared.run_shell(command, op_id=op_id)
    equal((first.replayed, second.replayed), (False, True), "replayed")
    equal(second.stdout, first.stdout, "the record")
    equal((await trial.shell("cat /tmp/once; rm /tmp/once")).split(), ["ran"], "what ran")


@check()
async def commands_run_side_by_side(trial: Trial) -> None:
    started = time.monotonic()
    results = await asyncio.gather(*(trial.shared.run_shell(f"sleep 0.5; echo {number}") for number in range(16)))
    equal([int(result.stdout) for result in results], list(range(16)), "each has its own output")
    holds(time.monotonic() - started < 6, "they do not wait for each other")


@check()
async def resource_limits_of_a_command_hold(trial: Trial) -> None:
    equal((await trial.shell("ulimit -n", rlimits={"nofile": [64, 64]})).strip(), "64", "ulimit -n")


@check()
async def results_tell_what_was_used(trial: Trial) -> None:
    result = await trial.shared.run_shell("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; sleep 0.1")
    holds(result.wall_ms >= 100, f"wall time {result.wall_ms} ms")
    holds(0 < result.cpu_ms <= result.wall_ms * 4, f"CPU time {result.cpu_ms} ms")
    holds(result.peak_memory_bytes > 0, f"peak memory {result.peak_memory_bytes}")
    holds(abs(result.started_at - time.time()) < 60, f"started at {result.started_at}")
