"""The README's quick start is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.cli.app import app

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


@pytest.mark.root
@pytest.mark.slow
def test_the_quick_start_works(node) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = code.replace('"debian"', '"tiny"')
    environ = node.environ | {"DSEC_URL": node.url}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 b'42\\n'", "kept in the sandbox", "agent", ""]
    assert node.dsec("ps", "-q").stdout == b""


def test_every_command_is_in_the_table() -> None:
    commands = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    missing = {name for name in commands - {"version"} if f"`dsec {name}" not in README}
    assert missing == set()


def test_links_to_pages_hold() -> None:
    root = Path(__file__).resolve().parents[2]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / target).exists(), target
