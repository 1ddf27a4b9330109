"""What strangers wrote goes to a terminal as text that does not steer it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.cli.output import print_json, print_table, printable, say

ESCAPES = "a\x1b]0;title\x07b\x9b31mc\rd\x7f\u202ee\udce9"


def steers(text: str) -> bool:
    return any(not character.isprintable() for character in text.replace("\n", "").replace("\t", ""))


def test_what_would_steer_is_escaped():
    assert steers(ESCAPES)
    assert printable(ESCAPES) == r"a\x1b]0;title\x07b\x9b31mc\rd\x7f\u202ee\udce9"
    assert printable("plain ünïcode [bold]") == "plain ünïcode [bold]"
    assert printable("a\nb") == r"a\nb"
    assert printable("a\nb", lines=True) == "a\nb"


def test_tables_and_json_hold_none_of_it(capsys):
    print_table(["NAME"], [[ESCAPES]])
    shown = capsys.readouterr().out
    assert not steers(shown)
    text = ESCAPES.removesuffix("\udce9")
    print_json({"name": text})
    shown = capsys.readouterr().out
    assert not steers(shown.replace("\u202e", ""))
    assert json.loads(shown) == {"name": text}


def test_errors_hold_none_of_it(capsys):
    say(f"dsec: no such thing: {ESCAPES}\n      do this")
    shown = capsys.readouterr().err
    assert not steers(shown)
    assert shown.endswith("do this\n")


@pytest.mark.root
@pytest.mark.slow
def test_an_environment_is_shown_and_compared_without_it(tmp_path: Path) -> None:
    environment = {**os.environ, "DSEC_STATE": str(tmp_path / "state"), "DSEC_RUN": str(tmp_path / "run"), "COLUMNS": "400"}
    for name in ("a", "b\x1b[31m"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file\x1b[32m\n").write_bytes(name.encode())

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "dsec.cli", *words], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    shown = run("env", "build", "one", "--from", f"dir:{tmp_path / 'a'}") + run(
        "env", "build", "two", "--from", f"dir:{tmp_path}/b\x1b[31m"
    )
    for words in (["show", "two"], ["ls"], ["history", "two"], ["tree", "two"], ["diff", "one", "two"], ["diff", "--json", "one", "two"]):
        shown += run("env", *words)
    assert not steers(shown)
    assert r"file\x1b[32m\n" in shown
