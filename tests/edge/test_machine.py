"""The state machine, event by event."""

from __future__ import annotations

import msgspec
import pytest

from dsec.edge.events import (
    CancelLaunch,
    Destroy,
    Destroyed,
    DestroyFailed,
    InitDied,
    Launched,
    LaunchFailed,
    Lost,
    OomKilled,
    Pause,
    Paused,
    PauseFailed,
    PauseWanted,
    Record,
    Restarted,
    Resume,
    Resumed,
    ResumeFailed,
    ResumeWanted,
    RetryDestroy,
    StopWanted,
    Tick,
    TtlSet,
)
from dsec.edge.machine import OUTCOMES, IllegalMove, Machine, Status
from libdsec.errors import Conflict, SandboxFailed

STATES = ("creating", "running", "pausing", "paused", "resuming", "stopping", "stopped", "failed")


def machine_in(state: str, at: float = 100.0, **ttl: float) -> Machine:
    """A machine that came to `state` at `at` in the ordinary way."""
    machine = Machine(Status(created_at=at, **ttl))
    ways = {
        "creating": [],
        "running": [Launched()],
        "pausing": [Launched(), PauseWanted()],
        "paused": [Launched(), PauseWanted(), Paused()],
        "resuming": [Launched(), PauseWanted(), Paused(), ResumeWanted()],
        "stopping": [Launched(), StopWanted()],
        "stopped": [Launched(), StopWanted(), Destroyed()],
        "failed": [Launched(), Lost("channel-closed")],
    }
    for event in ways[state]:
        machine.handle(event, at)
    machine.validate_state()
    assert machine.status.state == state
    return machine


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", list(OUTCOMES))
def test_every_verb_has_an_outcome_in_every_state(verb, state):
    machine = machine_in(state)
    if OUTCOMES[verb][state] == "refuse":
        with pytest.raises(SandboxFailed if state == "failed" else Conflict) as raised:
            machine.outcome(verb)
        assert raised.value.ran == "not-run"
        assert raised.value.cause == ("channel-closed" if state == "failed" else state)
    else:
        assert machine.outcome(verb) == OUTCOMES[verb][state]


@pytest.mark.parametrize("state", STATES)
def test_a_stop_ends_every_state(state):
    machine = machine_in(state)
    instructions = machine.handle(StopWanted(), 101)
    machine.validate_state()
    if state in ("stopping", "stopped", "failed"):
        assert instructions == []
    else:
        assert Destroy() in instructions
        assert machine.status.stop_reason == "requested"
        machine.handle(Destroyed(), 102)
        assert machine.status.state == "stopped"
        assert machine.status.ended_at == 102


def test_a_stop_while_creating_cancels_the_launch_first():
    assert machine_in("creating").handle(StopWanted(), 101) == [Record(), CancelLaunch(), Destroy()]


@pytest.mark.parametrize("answer", [Launched(), LaunchFailed("launch-failed")])
def test_the_launch_answer_that_a_stop_overtook_changes_nothing(answer):
    machine = machine_in("creating")
    machine.handle(StopWanted(), 101)
    assert machine.handle(answer, 102) == []
    assert machine.status.state == "stopping"


@pytest.mark.parametrize("answer", [Paused(), PauseFailed("busy")])
def test_the_pause_answer_that_a_stop_overtook_changes_nothing(answer):
    machine = machine_in("pausing")
    machine.handle(StopWanted(), 101)
    assert machine.handle(answer, 102) == []
    machine.validate_state()


@pytest.mark.parametrize(
    ("state", "event"),
    [
        ("running", Launched()),
        ("creating", Paused()),
        ("paused", PauseWanted()),
        ("running", ResumeWanted()),
        ("running", Destroyed()),
        ("stopped", Launched()),
        ("running", RetryDestroy()),
    ],
)
def test_an_illegal_move_raises_with_the_story(state, event):
    machine = machine_in(state)
    before = msgspec.msgpack.encode(machine.status)
    with pytest.raises(IllegalMove) as raised:
        machine.handle(event, 101)
    assert raised.value.story == machine.status.story
    assert state in str(raised.value)
    assert msgspec.msgpack.encode(machine.status) == before


def test_a_failed_launch_leaves_nothing_to_destroy():
    machine = machine_in("creating")
    assert machine.handle(LaunchFailed("store-lost", "blob missing"), 101) == [Record()]
    assert (machine.status.state, machine.status.cause, machine.status.clean) == ("failed", "store-lost", True)
    assert machine.status.story[-1].detail == "blob missing"


def test_losing_it_fails_and_destroys():
    machine = machine_in("running")
    assert machine.handle(Lost("channel-closed"), 101) == [Record(), Destroy()]
    assert machine.handle(Destroyed(), 102) == [Record()]
    assert (machine.status.state, machine.status.ended_at, machine.status.clean) == ("failed", 101, True)


def test_losing_it_during_the_launch_counts_once_it_is_launched():
    machine = machine_in("creating")
    assert machine.handle(Lost("channel-closed"), 101) == []
    assert Destroy() in machine.handle(Launched(), 102)
    assert (machine.status.state, machine.status.cause) == ("failed", "channel-closed")


def test_the_launch_failure_says_more_than_the_closed_channel():
    machine = machine_in("creating")
    machine.handle(Lost("channel-closed"), 101)
    machine.handle(LaunchFailed("disk", "no space"), 102)
    assert machine.status.cause == "disk"


def test_an_init_that_dies_after_an_oom_kill_died_of_it():
    machine = machine_in("running")
    assert machine.handle(OomKilled(), 101) == []
    assert machine.status.state == "running"
    machine.handle(InitDied(), 102)
    assert machine.status.cause == "oom"


def test_an_oom_kill_long_ago_explains_no_death():
    machine = machine_in("running")
    machine.handle(OomKilled(), 101)
    machine.handle(InitDied(), 1000)
    assert machine.status.cause == "init-died"


def test_an_oom_count_that_comes_after_the_death_explains_it():
    machine = machine_in("running")
    machine.handle(InitDied(), 101)
    assert machine.handle(OomKilled(), 101.2) == [Record()]
    assert machine.status.cause == "oom"


def test_a_failed_removal_is_retried_and_told():
    machine = machine_in("stopping")
    machine.handle(DestroyFailed("cgroup is busy"), 101)
    assert machine.status.state == "stopping"
    assert "cgroup is busy" in machine.status.detail
    assert machine.handle(RetryDestroy(), 102) == [Destroy()]
    assert machine.handle(RetryDestroy(), 103) == []
    machine.handle(Destroyed(), 104)
    assert (machine.status.state, machine.status.detail) == ("stopped", "")


def test_a_failed_removal_does_not_hide_why_it_failed():
    machine = machine_in("running")
    machine.handle(Lost("store-lost", "the store is gone"), 101)
    machine.handle(DestroyFailed("mount is busy"), 102)
    assert machine.status.detail == "the store is gone"


def test_a_failed_pause_runs_on_and_a_failed_resume_stays_paused():
    machine = machine_in("pausing", ttl_running_stop=10)
    machine.handle(PauseFailed("not supported"), 105)
    machine.validate_state()
    assert machine.deadline() == 115
    machine = machine_in("resuming")
    machine.handle(ResumeFailed("no memory"), 105)
    machine.validate_state()
    assert machine.status.state == "paused"
    assert machine.handle(ResumeWanted(), 106) == [Record(), Resume()]


def test_a_restored_copy_is_a_new_life():
    machine = machine_in("resuming")
    machine.handle(Resumed(new_life=True), 101)
    assert machine.status.generation == 2


@pytest.mark.parametrize("state", ["pausing", "resuming"])
def test_a_restart_half_way_through_a_pause_ends_in_running(state):
    machine = Machine(msgspec.msgpack.decode(msgspec.msgpack.encode(machine_in(state).status), type=Status))
    assert machine.handle(Restarted(), 101) == [Record(), Resume()]
    machine.handle(Resumed(), 102)
    machine.validate_state()
    assert machine.status.state == "running"


# -- time limits


def test_idle_for_its_time_it_stops():
    machine = machine_in("running", ttl_running_stop=10)
    assert machine.deadline() == 110
    assert machine.handle(Tick(), 109.9) == []
    assert Destroy() in machine.handle(Tick(), 110)
    assert machine.status.stop_reason == "idle"


def test_a_running_command_holds_the_idle_clock():
    machine = machine_in("running", ttl_running_stop=10)
    machine.begin_activity()
    machine.begin_activity()
    assert machine.deadline() is None
    assert machine.handle(Tick(), 1000) == []
    machine.end_activity(1000)
    assert machine.deadline() is None
    machine.end_activity(1001)
    assert machine.deadline() == 1011


def test_the_hard_limit_ends_a_busy_one():
    machine = machine_in("running", ttl_max=50, ttl_running_stop=10)
    machine.begin_activity()
    assert machine.deadline() == 150
    machine.handle(Tick(), 150)
    assert machine.status.stop_reason == "ttl-max"


def test_the_clocks_stand_still_in_a_pause():
    machine = machine_in("running", ttl_running_stop=10, ttl_max=50)
    machine.handle(PauseWanted(), 104)
    assert machine.deadline() is None
    machine.handle(Paused(), 105)
    assert machine.deadline() is None
    assert machine.idle_seconds(5000) == 4
    machine.handle(ResumeWanted(), 1104)
    machine.handle(Resumed(), 1104)
    assert machine.status.idle_since == 1100
    assert machine.deadline() == 1110
    machine.begin_activity()
    assert machine.deadline() == 1150


def test_paused_for_its_time_it_stops():
    machine = machine_in("paused", ttl_paused_stop=20)
    assert machine.handle(Tick(), 119) == []
    machine.handle(Tick(), 120)
    assert (machine.status.state, machine.status.stop_reason) == ("stopping", "idle")
    machine.validate_state()


def test_a_renewal_before_the_tick_wins_and_after_it_is_refused():
    machine = machine_in("running", ttl_running_stop=10)
    machine.handle(TtlSet(running_stop=30), 110)
    assert machine.handle(Tick(), 110) == []
    assert machine.deadline() == 140
    machine.handle(Tick(), 140)
    with pytest.raises(Conflict, match="stopping"):
        machine.handle(TtlSet(running_stop=30), 140)


def test_a_limit_is_removed_by_minus_one_and_kept_by_none():
    machine = machine_in("running", ttl_running_stop=10, ttl_max=50)
    machine.handle(TtlSet(running_stop=-1), 101)
    assert machine.status.ttl_running_stop is None
    assert machine.deadline() == 150


def test_a_renewal_in_a_pause_counts_from_its_start():
    machine = machine_in("paused", ttl_running_stop=10)
    machine.handle(TtlSet(running_stop=20), 500)
    machine.handle(ResumeWanted(), 600)
    machine.handle(Resumed(), 600)
    assert machine.deadline() == 620


def test_pause_and_resume_order_their_work():
    machine = machine_in("running")
    assert machine.handle(PauseWanted(), 101) == [Record(), Pause()]
    machine.handle(Paused(), 102)
    assert machine.handle(ResumeWanted(), 103) == [Record(), Resume()]


def test_the_story_is_a_ring():
    machine = machine_in("running")
    for at in range(200, 300, 2):
        machine.handle(PauseWanted(), at)
        machine.handle(PauseFailed("no"), at + 1)
    machine.validate_state()
    assert len(machine.status.story) == 32
    assert machine.status.story[-1].at == 299


def test_the_status_survives_its_encoding():
    status = machine_in("paused", ttl_running_stop=10).status
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=Status) == status
