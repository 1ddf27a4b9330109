"""Set-up: the list of packages, and what the script refuses. That it works on a bare system is what a run on one shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def test_every_package_has_a_group_and_a_reason() -> None:
    lines = [line for line in (PROJECT / "scripts/packages.txt").read_text().splitlines() if line and not line.startswith("#")]
    fields = [line.split(maxsplit=2) for line in lines]
    assert all(len(each) == 3 for each in fields)
    assert {group for group, _, _ in fields} == {"run", "test", "bench"}
    names = [package for _, package, _ in fields]
    assert sorted(set(names)) == sorted(names)


def test_an_unknown_goal_is_refused_and_nothing_is_done() -> None:
    done = subprocess.run([PROJECT / "scripts/setup.sh", "everything"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run, test, bench" in done.stderr
    assert done.stdout == ""


def test_make_lists_its_targets() -> None:
    done = subprocess.run(["make", "-C", str(PROJECT), "--no-print-directory"], capture_output=True, text=True, check=True)
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")}
    assert listed == {"help", "setup", "run", "test", "test-quick", "lint", "fmt", "bench", "clean"}
