"""Shell sessions: folder and environment stay, commands take turns, the tree dies with the session."""

import asyncio
import time

import pytest

from libdsec.errors import Conflict, InvalidArgument, NotFound
from libdsec.schema import ExecRequest, SessionRequest, SessionRunRequest

pytestmark = pytest.mark.root


@pytest.fixture
async def run(box):
    """A session `ss` and a way to run in it."""
    await box.channel.open_session("ss", SessionRequest())

    async def run(text, op_id=None, **options):
        return await box.channel.run_in_session("ss", op_id or box.op(), SessionRunRequest(shell=text, **options))

    return run


async def test_folder_variables_and_functions_stay(run):
    assert (await run("cd /tmp; export A=1; B=2; f() { echo f:$1; }")).exit_code == 0
    assert (await run("pwd; echo $A$B; f x; sh -c 'echo $A$B'")).stdout == b"/tmp\n12\nf:x\n1\n"


async def test_exit_codes_are_the_commands_and_the_session_lives_on(run):
    assert (await run("false")).exit_code == 1
    assert (await run("sh -c 'exit 42'")).exit_code == 42
    assert (await run("nonsense-command")).exit_code == 127
    assert (await run("echo $?; echo alive")).stdout.endswith(b"alive\n")


async def test_output_of_each_command_is_its_own(run):
    results = [await run(f"echo {number}; echo e{number} >&2") for number in range(5)]
    assert [result.stdout for result in results] == [b"%d\n" % number for number in range(5)]
    assert [result.stderr for result in results] == [b"e%d\n" % number for number in range(5)]


async def test_awkward_text_is_run_as_it_is(run):
    assert (await run("echo 'single' \"double\" \\\\ # comment")).stdout == b"single double \\\n"
    assert (await run("cat <<'EOF'\nit's $HOME\nEOF")).stdout == b"it's $HOME\n"
    assert (await run("if true; then\n  echo yes\nfi")).stdout == b"yes\n"


async def test_a_syntax_error_does_not_end_the_session(run):
    assert (await run("if then fi )")).exit_code not in (0, None)
    assert (await run("echo on")).stdout == b"on\n"


async def test_commands_take_turns(run):
    results = await asyncio.gather(*(run(f"echo {number}; sleep 0.02") for number in range(5)))
    assert [result.stdout for result in results] == [b"%d\n" % number for number in range(5)]


@pytest.mark.slow
async def test_a_timeout_ends_the_command_and_not_the_session(run):
    await run("X=kept")
    result = await run("echo a; sleep 60", timeout=0.3, kill_grace=0.2)
    assert result.timed_out
    assert result.stdout == b"a\n"
    assert (await run("echo $X")).stdout == b"kept\n"


@pytest.mark.parametrize(
    ("written", "limit", "kept"), [(50_000, 1000, 1000), (50_000, 0, 0), (6_000_000, 8 << 20, 6_000_000)], ids=["little", "none", "much"]
)
async def test_each_command_keeps_as_much_output_as_it_asks_for(run, written, limit, kept):
    await run("echo before")
    result = await run(f"printf begin; head -c {written - 8} /dev/zero; printf end", output_limit_bytes=limit)
    assert (len(result.stdout), result.stdout_bytes, result.stdout_dropped) == (kept, written, written - kept)
    if kept:
        assert (result.stdout[:5], result.stdout[-3:]) == (b"begin", b"end")
    assert (await run("echo after")).stdout == b"after\n"


async def test_exit_ends_the_session(run, box, until):
    assert (await run("exit 5")).exit_code == 5
    with pytest.raises((NotFound, Conflict)):
        await run("echo")


async def test_closing_kills_the_whole_tree(run, box):
    await run("sleep 1001 & (setsid sleep 1002 &)")
    started = time.monotonic()
    await box.channel.close_session("ss")
    assert time.monotonic() - started < 5
    assert await box.out("ps -o args | grep '[s]leep 100' || true") == ""
    with pytest.raises(NotFound):
        await box.channel.close_session("ss")


async def test_a_session_that_several_close_at_once_is_closed_for_all_of_them(box):
    for _ in range(5):
        await box.channel.open_session("ss", SessionRequest())
        answers = await asyncio.gather(*(box.channel.close_session("ss") for _ in range(4)), return_exceptions=True)
        assert None in answers
        assert all(answer is None or isinstance(answer, NotFound) for answer in answers), answers


async def test_a_command_that_several_close_at_once_is_closed_for_all_of_them(box):
    for number in range(5):
        await box.channel.start(f"op-c{number}", ExecRequest(argv=["sleep", "1000"]))
        answers = await asyncio.gather(*(box.channel.close_session(f"op-c{number}") for _ in range(4)), return_exceptions=True)
        assert None in answers
        assert all(answer is None or isinstance(answer, NotFound) for answer in answers), answers


async def test_user_folder_and_environment_of_a_session(box):
    await box.channel.open_session("ss", SessionRequest(user="guest", cwd="/tmp", env={"E": "v"}))
    result = await box.channel.run_in_session("ss", "op", SessionRunRequest(shell="id -un; pwd; echo $E"))
    assert result.stdout == b"guest\n/tmp\nv\n"
    [session] = [session for session in await box.channel.sessions() if session.session_id == "ss"]
    assert (session.kind, session.running) == ("shell", True)


@pytest.mark.parametrize(("options", "field"), [({"user": "nobody-here"}, "user"), ({"cwd": "/not/there"}, "cwd")], ids=["user", "cwd"])
async def test_a_session_that_cannot_begin_names_the_field(box, options, field):
    with pytest.raises((InvalidArgument, NotFound)) as caught:
        await box.channel.open_session("ss", SessionRequest(**options))
    assert caught.value.field == field


async def test_a_result_can_be_fetched_again_and_forgotten(run, box):
    await run("echo kept", op_id="op-r")
    assert (await box.channel.wait("op-r", session_id="ss")).stdout == b"kept\n"
    await box.channel.acknowledge("ss", "op-r")
    with pytest.raises(NotFound):
        await box.channel.wait("op-r", session_id="ss")
    assert (await run("echo on")).stdout == b"on\n"
