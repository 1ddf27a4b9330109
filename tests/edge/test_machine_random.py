"""Random lives: whatever order events come in, the invariants hold and nothing is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsec.edge import events
from dsec.edge.machine import OUTCOMES, Machine, Status
from libdsec.errors import Conflict, SandboxFailed

OVER = ("stopped", "failed")


class Life(RuleBasedStateMachine):
    """A rim that answers each order once, at any later time, while the world and the clients do what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.machine = Machine(Status(created_at=self.now, ttl_running_stop=20.0, ttl_max=100.0, ttl_paused_stop=30.0))
        self.orders: list[object] = ["launch"]
        self.destroys = 0
        self.ended_as: str | None = None

    def feed(self, event: events.Event) -> None:
        state = self.machine.status.state
        instructions = self.machine.handle(event, self.now)
        if self.machine.status.state != state:
            assert events.Record() in instructions, "a new state is always recorded"
        for instruction in instructions:
            match instruction:
                case events.Destroy():
                    assert self.destroys == 0, "one removal at a time"
                    self.destroys += 1
                    self.orders.append("destroy")
                case events.Pause():
                    self.orders.append("pause")
                case events.Resume():
                    self.orders.append("resume")
                case events.CancelLaunch():
                    assert "launch" in self.orders, "only what is under way is cancelled"

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 19.0, 25.0, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        due = self.machine.deadline()
        self.feed(events.Tick())
        if due is not None and due <= self.now:
            assert self.machine.status.state == "stopping", "a limit that has passed stops it at the tick"

    @rule(reason=st.sampled_from(["requested", "sweep"]))
    def stop(self, reason) -> None:
        self.feed(events.StopWanted(reason))
        assert self.machine.status.state in ("stopping", *OVER)

    @rule(verb=st.sampled_from(["pause", "resume", "use"]))
    def ask(self, verb) -> None:
        if OUTCOMES[verb][self.machine.status.state] == "refuse":
            with pytest.raises(SandboxFailed if self.machine.status.state == "failed" else Conflict):
                self.machine.outcome(verb)
            return
        outcome = self.machine.outcome(verb)
        if verb == "pause" and outcome == "do":
            self.feed(events.PauseWanted())
        elif (verb == "resume" and outcome == "do") or outcome == "resume":
            self.feed(events.ResumeWanted())

    @rule(
        running=st.sampled_from([None, -1.0, 5.0, 50.0]),
        most=st.sampled_from([None, -1.0, 5.0, 200.0]),
        paused=st.sampled_from([None, -1.0, 5.0]),
    )
    def renew(self, running, most, paused) -> None:
        if self.machine.status.state in ("stopping", *OVER):
            return
        self.feed(events.TtlSet(running, most, paused))

    @rule(event=st.sampled_from([events.Lost("channel-closed"), events.Lost("store-lost"), events.InitDied(), events.OomKilled()]))
    def world(self, event) -> None:
        self.feed(event)

    @rule()
    def begin_activity(self) -> None:
        if self.machine.status.state == "running":
            self.machine.begin_activity()

    @precondition(lambda self: self.machine.active)
    @rule()
    def end_activity(self) -> None:
        self.machine.end_activity(self.now)

    @precondition(lambda self: self.orders)
    @rule(well=st.booleans(), new_life=st.booleans())
    def answer(self, well: bool, new_life: bool) -> None:
        # The rim serialises what the backend does for one sandbox: answers come in the order of the orders.
        match self.orders.pop(0):
            case "launch":
                self.feed(events.Launched() if well else events.LaunchFailed("launch-failed"))
            case "pause":
                self.feed(events.Paused() if well else events.PauseFailed("no"))
            case "resume":
                self.feed(events.Resumed(new_life) if well else events.ResumeFailed("no"))
            case "destroy":
                self.destroys -= 1
                self.feed(events.Destroyed() if well else events.DestroyFailed("busy"))

    @precondition(lambda self: self.machine.status.state in ("stopping", "failed"))
    @rule()
    def sweep(self) -> None:
        self.feed(events.RetryDestroy())

    @invariant()
    def valid(self) -> None:
        self.machine.validate_state()

    @invariant()
    def an_end_is_an_end(self) -> None:
        state = self.machine.status.state
        if self.ended_as is not None:
            assert state == self.ended_as
        if state in OVER:
            self.ended_as = state

    @invariant()
    def removal_is_never_forgotten(self) -> None:
        status = self.machine.status
        if status.state in ("stopping", "failed") and not status.clean:
            told = any(line.event == "destroy-failed" for line in status.story)
            assert self.machine.destroying == (self.destroys == 1)
            assert self.machine.destroying or told, "an ending sandbox is being removed, or the sweep knows"

    @invariant()
    def transitional_states_have_somebody_at_work(self) -> None:
        state = self.machine.status.state
        if state == "creating":
            assert "launch" in self.orders
        if state == "pausing":
            assert "pause" in self.orders
        if state == "resuming":
            assert "resume" in self.orders

    def teardown(self) -> None:
        """From wherever it is, a stop and honest answers lead to an end with nothing left."""
        self.feed(events.StopWanted())
        for _ in range(10):
            while self.orders:
                self.answer_well()
            if self.machine.status.clean:
                break
            self.feed(events.RetryDestroy())
        assert self.machine.status.clean
        assert self.machine.status.state in OVER

    def answer_well(self) -> None:
        match self.orders.pop(0):
            case "launch":
                self.feed(events.Launched())
            case "pause":
                self.feed(events.Paused())
            case "resume":
                self.feed(events.Resumed())
            case "destroy":
                self.destroys -= 1
                self.feed(events.Destroyed())


TestLife = pytest.mark.slow(Life.TestCase)
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
