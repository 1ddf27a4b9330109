"""Builds, snapshots, names, sandboxes and collections at once on two nodes, killed at any point: nothing that is used is lost, nothing else
is left. Longer: garbage_driver.py by hand, with other seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]

DRIVER = Path(__file__).with_name("garbage_driver.py")


@pytest.mark.parametrize("seed", range(1, 5))
def test_what_is_used_stays_and_what_is_not_goes_whoever_is_killed(tmp_path, seed):
    done = subprocess.run([sys.executable, DRIVER, tmp_path, str(seed), "4"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["killed"] > 5
    assert result["steps"] > 5
    assert result["layers"] > 0
