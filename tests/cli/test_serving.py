"""`dsec up` and `dsec down`: what they leave, and what they do not.

No server is shared here: the mount namespace that another instance's launcher copied would keep this one's image in use.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]


def told(node, text: str, seconds: float = 10) -> str:
    """The server's log once `text` is in it."""
    deadline = time.monotonic() + seconds
    while text not in (log := node.log.read_text()):
        assert time.monotonic() < deadline, f"{text!r} is not in {log}"
        time.sleep(0.02)
    return log


def test_a_sandbox_outlives_the_server_and_down_ends_all(state_run, tiny_store: Path, start_node) -> None:
    first = start_node(state_run, tiny_store)
    try:
        sandbox_id = first.dsec("run", "-d", "tiny", "sleep", "1000").stdout.decode().strip()
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(20) == 0
        told(first, "1 sandboxes go on")
        second = start_node(state_run, tiny_store)
        try:
            told(second, "1 sandboxes found again")
            assert second.dsec("exec", sandbox_id, "echo", "alive").stdout == b"alive\n"
            done = second.dsec("down")
            assert b"1 sandboxes stopped" in done.stderr, done.stderr
            assert second.process.wait(10) == 0
        finally:
            second.process.kill()
            second.process.wait()
    finally:
        first.process.kill()
        first.process.wait()
        first.dsec("down")


def test_up_with_rm_ends_all_with_it(state_run, tiny_store: Path, start_node) -> None:
    served = start_node(state_run, tiny_store, "--rm")
    try:
        served.dsec("run", "-d", "tiny")
        again = served.dsec("up")
        assert again.returncode == 1
        assert b"another edge" in again.stderr
    finally:
        served.process.terminate()
        assert served.process.wait(20) == 0


def test_tcp_needs_the_token(state_run, tiny_store: Path, start_node) -> None:
    served = start_node(state_run, tiny_store, "--tcp", "127.0.0.1:0", "--json")
    try:
        text = told(served, "}")
        serving = json.loads(text[text.index("{") : text.rindex("}") + 1])
        token_file = Path(serving["token_file"])
        assert token_file.stat().st_mode & 0o777 == 0o600
        environ = served.environ | {"DSEC_URL": serving["tcp"]}
        command = [sys.executable, "-m", "dsec.cli", "ps"]
        refused = subprocess.run(command, env=environ, capture_output=True, timeout=20, check=False)
        assert refused.returncode == 1
        assert b"token" in refused.stderr
        environ["DSEC_TOKEN"] = token_file.read_text().strip()
        assert subprocess.run(command, env=environ, capture_output=True, timeout=20, check=False).returncode == 0
    finally:
        served.process.terminate()
        assert served.process.wait(20) == 0


@pytest.mark.parametrize(
    ("option", "word"),
    [
        (("--state", "/proc/nope"), "/proc/nope"),
        (("--tcp", "nonsense"), "host:port"),
        (("--log-level", "loud"), "--log-level"),
        (("--scratch", "/etc/passwd"), "/etc/passwd"),
    ],
    ids=["state", "tcp", "level", "scratch"],
)
def test_what_cannot_be_served_is_one_line(state_run, option: tuple[str, str], word: str) -> None:
    command = [sys.executable, "-m", "dsec.cli", "up", "--state", str(state_run.state), "--run", str(state_run.run), *option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, 2)
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not (state_run.run / "dsec.sock").exists()
