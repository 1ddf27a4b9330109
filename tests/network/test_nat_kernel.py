"""NAT networks on the real kernel, in a network namespace of the test's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def found():
    """What the trial reached; see nat_trial.py."""
    command = ["unshare", "--net", sys.executable, str(Path(__file__).with_name("nat_trial.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found["probe"] is not None:
        pytest.skip(f"NAT cannot work here: {found['probe']}")
    return found


def test_the_outside_is_reached_by_the_hosts_address(found):
    assert found["outside"] == found["outside_from_b"] == "203.0.113.1"


def test_the_hosts_name_servers_answer(found):
    assert found["resolver_local"] == found["resolver_remote"] == "answer"
    assert found["resolv_conf"] == "nameserver 100.64.0.1\nnameserver 203.0.113.2\n"


@pytest.mark.parametrize(
    "where",
    ["other_sandbox", "host_by_gateway", "host_by_address", "host_loopback_by_gateway", "metadata", "into_sandbox_from_outside"],
)
def test_what_is_not_the_outside_is_not_reached(found, where):
    assert found[where] == "no"


def test_loopback_inside_works(found):
    assert found["own_loopback"] == "127.0.0.1"


def test_links_are_known_by_their_sandbox_also_after_a_restart(found):
    assert found["owned"] == found["owned_after_restart"] == ["sb-a", "sb-b"]


def test_detaching_cuts_one_off_and_not_the_other(found):
    assert (found["cut_off"], found["other_goes_on"]) == ("no", "203.0.113.1")


def test_a_range_can_be_attached_again(found):
    assert found["address_again"] == "203.0.113.1"


def test_nothing_is_left_but_only_when_nobody_needs_it(found):
    assert "dsec_0123abcd" in found["table_while_used"]
    assert found["tables_left"] == ""
    assert [link for link in found["links_left"] if link.startswith("d")] == []


def test_the_table_of_a_life_that_was_killed_goes_with_the_next_start(found):
    assert "dsec_0123abcd" in found["tables_after_a_kill"]
    assert found["tables_after_the_next_start"] == ""
