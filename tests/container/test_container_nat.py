"""network="nat" through the backend, in a network namespace of the test's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_a_nat_sandbox_has_an_address_a_route_and_name_servers_and_leaves_nothing(state_run, tiny_rootfs):
    trial = str(Path(__file__).with_name("nat_sandbox_trial.py"))
    command = ["unshare", "--net", sys.executable, trial, str(tiny_rootfs), str(state_run.state), str(state_run.run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "eth0" in found["inside"]
    assert "100.64." in found["inside"]
    assert "default via 100.64.0.1 dev eth0" in found["inside"]
    assert "nameserver" in found["inside"] or "no name server" in found["inside"]
    assert len(found["links"]) == 1
    assert found["owned"] == ["sb-nat"]
    assert found["left"] == []
    assert found["tables"] == ""
