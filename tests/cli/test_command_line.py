"""What the command says and how it ends, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from dsec.cli.app import app
from dsec.cli.copy import split
from dsec.cli.options import pairs
from dsec.cli.output import amount, command_exit_code, duration, exit_code
from libdsec.errors import Conflict, ConnectionFailed, InvalidArgument, NotFound
from libdsec.schema import ExecResult


def dsec(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsec.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=30, check=False)


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ({"exit_code": 0}, 0),
        ({"exit_code": 255}, 255),
        ({"exit_code": None, "signal": 9}, 137),
        ({"exit_code": None, "signal": 15, "timed_out": True}, 124),
        ({"exit_code": None}, 125),
    ],
)
def test_exit_code_of_a_guests_command(result: dict, code: int) -> None:
    assert command_exit_code(ExecResult(op_id="op", **result)) == code


def test_exit_code_tells_the_kind_of_error() -> None:
    assert [exit_code(kind("x")) for kind in (Conflict, InvalidArgument, NotFound, ConnectionFailed)] == [1, 2, 3, 4]


def test_copy_tells_sandbox_paths_from_local_ones() -> None:
    assert split("sb-local-abc:/etc/passwd") == ("sb-local-abc", "/etc/passwd")
    assert split("sb-local-abc:") == ("sb-local-abc", "/")
    assert split("./sb-x:y") == (None, "./sb-x:y")
    assert split("plain") == (None, "plain")
    assert split("name:with-colon") == (None, "name:with-colon")


def test_pairs_keep_equal_signs_in_values() -> None:
    assert pairs(["A=1", "B=x=y", "C="], "--env") == {"A": "1", "B": "x=y", "C": ""}
    with pytest.raises(InvalidArgument, match="--env"):
        pairs(["novalue"], "--env")


def test_amounts_and_durations_read_well() -> None:
    assert [amount(size) for size in (None, 0, 1023, 1536, 250 << 20, 3 << 40)] == ["-", "0 B", "1023 B", "1.5 KiB", "250 MiB", "3.0 TiB"]
    assert [duration(seconds) for seconds in (None, 0.05, 5, 300, 7200, 604800)] == ["-", "50 ms", "5 s", "5 min", "2 h", "7 d"]


@pytest.mark.slow
def test_without_a_server_the_next_step_is_named(tmp_path: Path) -> None:
    done = dsec("ps", DSEC_RUN=str(tmp_path))
    assert done.returncode == 4
    assert done.stdout == ""
    assert "dsec up" in done.stderr
    done = dsec("ps", "--json", DSEC_RUN=str(tmp_path))
    assert done.returncode == 4
    assert json.loads(done.stdout)["error"]["code"] == "connection_failed"
    assert dsec("run", "tiny", "true", DSEC_RUN=str(tmp_path)).returncode == 125


@pytest.mark.slow
def test_wrong_use_is_told_before_anything_runs(tmp_path: Path) -> None:
    for arguments, word in (
        (("cp", "a", "b"), "SOURCE"),
        (("rm",), "SANDBOX"),
        (("run", "-e", "novalue", "tiny"), "NAME=value"),
        (("run", "-t", "tiny"), "terminal"),
    ):
        done = dsec(*arguments, DSEC_RUN=str(tmp_path))
        assert done.returncode in (2, 125), arguments
        assert word in done.stderr, arguments
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_version_and_the_list_of_commands() -> None:
    assert dsec("--version").stdout.startswith("dsec ")
    told = dsec("--help").stdout
    for command in ("up", "down", "run", "exec", "ps", "logs", "cp", "rm", "pause", "resume", "env", "doctor", "self-check"):
        assert command in told


@pytest.mark.slow
def test_completion_can_be_shown() -> None:
    # The shell is told from the parent process.
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m dsec.cli --show-completion; exit $?"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout


@pytest.mark.root
@pytest.mark.slow
def test_environments_on_a_state_folder(tmp_path: Path, tiny_rootfs: Path) -> None:
    env = {"DSEC_STATE": str(tmp_path / "state"), "DSEC_RUN": str(tmp_path / "run")}
    assert json.loads(dsec("env", "ls", "--json", **env).stdout) == []
    built = dsec("env", "build", "little:v1", "--from", f"dir:{tiny_rootfs}", **env)
    assert built.returncode == 0, built.stderr
    assert "publishing" in built.stderr
    listed = json.loads(dsec("env", "ls", "--json", **env).stdout)
    assert [(info["name"], info["kind"]) for info in listed] == [("little:v1", "base")]
    assert "sha256:" in dsec("env", "show", "little:v1", **env).stdout
    assert dsec("env", "show", "other", **env).returncode == 3
    assert dsec("env", "build", "bad", "--from", "nonsense", **env).returncode == 2
    assert dsec("env", "rm", "little:v1", **env).returncode == 0
    assert json.loads(dsec("env", "ls", "--json", **env).stdout) == []


def _commands(group):
    yield from (command.callback for command in group.registered_commands)
    for each in group.registered_groups:
        yield from _commands(each.typer_instance)


def test_no_path_is_looked_up_on_a_disk_while_it_is_parsed():
    """The folder of a store may be on a file system that hangs, and what hangs in parsing cannot say so."""
    seen, looked_up = set(), set()
    for command in _commands(app):
        for name, hint in typing.get_type_hints(command, include_extras=True).items():
            for each in [hint, *typing.get_args(hint)]:
                for option in getattr(each, "__metadata__", ()):
                    if Path in (typing.get_args(each)[0], *typing.get_args(typing.get_args(each)[0])):
                        (seen if option.parser is Path else looked_up).add((command.__module__, name))
    assert looked_up == set()
    assert ("dsec.cli.environments", "store") in seen
