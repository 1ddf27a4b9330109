"""The command against a real server: what a user types, and what comes back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def sandbox(node) -> Iterator[str]:
    made = node.dsec("run", "-d", "tiny")
    assert made.returncode == 0, made.stderr
    sandbox_id = made.stdout.decode().strip()
    yield sandbox_id
    node.dsec("rm", sandbox_id)


def live(node) -> list[str]:
    return node.dsec("ps", "-q").stdout.decode().split()


def test_run_passes_streams_and_exit_code(node) -> None:
    done = node.dsec("run", "-i", "tiny", "sh", "-c", "cat; echo err >&2; exit 9", stdin=b"in\0put\n")
    assert (done.returncode, done.stdout, done.stderr) == (9, b"in\0put\n", b"err\n")
    assert live(node) == []


def test_run_says_what_ended_the_command(node) -> None:
    assert node.dsec("run", "tiny", "sh", "-c", "kill -9 $$").returncode == 137
    timed = node.dsec("run", "--timeout", "0.3", "tiny", "--", "sleep", "60")
    assert timed.returncode == 124
    assert b"timeout" in timed.stderr
    missing = node.dsec("run", "no-such-image", "true")
    assert missing.returncode == 125
    assert b"dsec env ls" in missing.stderr


def test_two_dashes_set_the_command_apart_and_are_no_part_of_it(node, sandbox: str) -> None:
    assert node.dsec("exec", sandbox, "--", "echo", "-n", "--", "x").stdout == b"-- x"
    assert node.dsec("exec", "--json", sandbox, "--", "sh", "-c", "exit 3").returncode == 3
    assert node.dsec("run", "tiny", "--", "sh", "-c", "exit 4").returncode == 4
    made = node.dsec("run", "-d", "tiny", "--", "sleep", "1000").stdout.decode().strip()
    try:
        (started,) = json.loads(node.dsec("logs", "--json", made).stdout)
        assert started["argv"] == ["sleep", "1000"]
    finally:
        node.dsec("rm", made)


def test_options_reach_the_sandbox(node) -> None:
    options = ["--cpus", "1", "--memory", "128", "--env", "A=b c", "--workdir", "/tmp", "--hostname", "named", "--user", "1000"]
    done = node.dsec("run", *options, "tiny", "sh", "-c", 'nproc; echo "$A"; pwd; hostname; id -u')
    assert done.stdout.decode().splitlines() == ["1", "b c", "/tmp", "named", "1000"]


def test_keep_leaves_it_running_and_json_describes_it(node) -> None:
    done = node.dsec("run", "--keep", "--label", "mine=yes", "tiny", "true")
    (sandbox_id,) = live(node)
    try:
        assert sandbox_id in done.stderr.decode()
        (listed,) = json.loads(node.dsec("ps", "--json", "--label", "mine=yes").stdout)
        assert (listed["sandbox_id"], listed["state"]) == (sandbox_id, "running")
        assert json.loads(node.dsec("ps", "--json", "--label", "mine=no").stdout) == []
    finally:
        assert node.dsec("rm", sandbox_id).returncode == 0
    assert json.loads(node.dsec("show", "--json", sandbox_id).stdout)["state"] == "stopped"


def test_exec_logs_and_rm(node, sandbox: str) -> None:
    assert node.dsec("exec", sandbox, "echo", "hello").stdout == b"hello\n"
    result = json.loads(node.dsec("exec", "--json", sandbox, "sh", "-c", "exit 3").stdout)
    assert result["exit_code"] == 3
    (first, second) = json.loads(node.dsec("logs", "--json", sandbox).stdout)
    assert first["argv"] == ["echo", "hello"]
    assert second["result"]["exit_code"] == 3
    assert node.dsec("logs", sandbox, first["op_id"]).stdout == b"hello\n"
    assert node.dsec("rm", sandbox).returncode == 0
    assert node.dsec("logs", sandbox, first["op_id"]).stdout == b"hello\n"
    assert node.dsec("exec", sandbox, "true").returncode == 125


def test_rm_of_several_does_all_it_can(node) -> None:
    ids = [node.dsec("run", "-d", "tiny").stdout.decode().strip() for _ in range(2)]
    done = node.dsec("rm", ids[0], "sb-local-none", ids[1])
    assert done.returncode == 3
    assert live(node) == []
    assert node.dsec("rm", "--all").returncode == 0


def test_pause_and_resume(node, sandbox: str) -> None:
    assert b"paused" in node.dsec("pause", sandbox).stdout
    assert json.loads(node.dsec("show", "--json", sandbox).stdout)["state"] == "paused"
    assert b"running" in node.dsec("resume", sandbox).stdout
    assert node.dsec("exec", sandbox, "echo", "on").stdout == b"on\n"


def test_cp_both_ways(node, sandbox: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_bytes(b"\0data")
    (tree / "link").symlink_to("sub/file")
    assert node.dsec("cp", str(tree), f"{sandbox}:/tmp").returncode == 0
    assert node.dsec("exec", sandbox, "readlink", "/tmp/tree/link").stdout == b"sub/file\n"
    assert node.dsec("cp", f"{sandbox}:/tmp/tree", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/sub/file").read_bytes() == b"\0data"
    assert (tmp_path / "back/link").readlink() == Path("sub/file")
    assert node.dsec("cp", f"{sandbox}:/tmp/tree/sub/file", "-").stdout == b"\0data"
    assert node.dsec("cp", f"{sandbox}:/no/such", str(tmp_path)).returncode == 3
    assert node.dsec("cp", str(tmp_path / "none"), f"{sandbox}:/tmp").returncode == 3


WHERE_IS_THE_CURSOR = b"\x1b[6n"
"""Busybox's shell asks, and takes the next keys for the answer."""


class Terminal:
    """A command on a terminal of its own, as a person has one."""

    def __init__(self, command: list[str], environ: dict[str, str], rows: int, cols: int) -> None:
        self.master, slave = pty.openpty()
        self.slave = slave
        self.resize(rows, cols)
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(command, env=environ, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        self.seen = b""

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def expect(self, text: bytes, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; came {self.seen!r}"
            piece = os.read(self.master, 65536)
            if WHERE_IS_THE_CURSOR in piece:
                os.write(self.master, b"\x1b[1;1R")
            self.seen += piece
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def test_a_terminal_in_the_sandbox(node, sandbox: str) -> None:
    environ = node.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "7"}  # of another terminal, as by inheritance
    terminal = Terminal([sys.executable, "-m", "dsec.cli", "exec", "-it", sandbox, "sh"], environ, 31, 97)
    try:
        terminal.expect(b"# ")
        terminal.type(b"stty size; echo $TERM; PS1=ready'>'\r")
        terminal.expect(b"31 97")
        terminal.expect(b"xterm")
        terminal.expect(b"ready>")
        # Ctrl-C goes to what runs inside, not to us.
        # It says that it has begun: before that the keys would reach the shell, which ignores them.
        terminal.type(b"sh -c 'echo begun; exec sleep 60'\r")
        terminal.expect(b"begun\r\n")
        terminal.type(b"\x03")
        terminal.expect(b"ready>")
        terminal.resize(40, 111)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.type(b"sleep 0.2; stty size\r")
        terminal.expect(b"40 111")
        terminal.type(b"exit 6\r")
        assert terminal.process.wait(10) == 6
        assert termios.tcgetattr(terminal.slave) == terminal.before
    finally:
        terminal.close()


def test_ctrl_c_reaches_the_command_and_run_stops_its_sandbox(node) -> None:
    command = [
        sys.executable,
        "-m",
        "dsec.cli",
        "run",
        "tiny",
        "sh",
        "-c",
        "trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.05; done",
    ]
    with subprocess.Popen(command, env=node.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"caught\n"
        assert process.wait(15) == 4
    assert live(node) == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_closes_leaves_no_sandbox(node, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dsec.cli", "run", "tiny", "sh", "-c", "echo ready; exec sleep 60"]
    with subprocess.Popen(command, env=node.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(15) == 128 + number
    assert live(node) == []


def test_a_command_ends_with_the_terminal_that_watches_it(node, sandbox: str) -> None:
    command = [sys.executable, "-m", "dsec.cli", "exec", sandbox, "sh", "-c", "echo ready; exec sleep 4711"]
    with subprocess.Popen(command, env=node.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.wait(15) == 128 + signal.SIGHUP
    assert b"4711" not in node.dsec("exec", sandbox, "ps").stdout


def test_a_reader_that_leaves_ends_the_command(node, sandbox: str) -> None:
    command = f"{sys.executable} -m dsec.cli exec {sandbox} yes | head -n 2; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=node.environ, capture_output=True, timeout=30, check=False)
    assert done.stdout.decode().splitlines() == ["y", "y", "141"]
