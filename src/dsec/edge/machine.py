"""The life of one sandbox as a pure state machine: events in, instructions out; no I/O, no clock.

    creating -> running <-> pausing -> paused -> resuming -> running
        any of these -> stopping -> stopped
        any of these but stopping, stopped -> failed (with a cause)

The rim (dsec.edge.lifecycle) performs the instructions and reports back by events. What each verb of the API means in each state is
the table `OUTCOMES`. All time limits are decided here, so a renewal that races an expiry is settled by the order in which the two events
arrive. After the worker of dask.distributed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dsec.edge.events import (
    CancelLaunch,
    Destroy,
    Destroyed,
    DestroyFailed,
    Event,
    InitDied,
    Instruction,
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
from libdsec.errors import Conflict, DSecError, SandboxFailed
from libdsec.schema import FailureCause, SandboxState, StopReason, StoryLine

__all__ = ["OUTCOMES", "IllegalMove", "Machine", "Outcome", "Status", "Verb"]

STORY_LINES = 32
OOM_WINDOW_SECONDS = 10.0
"""An init that dies this soon after an OOM kill died of it."""

Verb = Literal["use", "pause", "resume", "stop", "update", "snapshot"]
Outcome = Literal["do", "wait", "resume", "already", "refuse"]

OUTCOMES: dict[Verb, dict[SandboxState, Outcome]] = {
    # `use` is exec, start, signal, sessions, files, ports: whatever needs the sandbox to run.
    "use": {
        "creating": "wait",
        "running": "do",
        "pausing": "wait",
        "paused": "resume",
        "resuming": "wait",
        "stopping": "refuse",
        "stopped": "refuse",
        "failed": "refuse",
    },
    "pause": {
        "creating": "wait",
        "running": "do",
        "pausing": "wait",
        "paused": "already",
        "resuming": "wait",
        "stopping": "refuse",
        "stopped": "refuse",
        "failed": "refuse",
    },
    "resume": {
        "creating": "wait",
        "running": "already",
        "pausing": "wait",
        "paused": "do",
        "resuming": "wait",
        "stopping": "refuse",
        "stopped": "refuse",
        "failed": "refuse",
    },
    "stop": {
        "creating": "do",
        "running": "do",
        "pausing": "do",
        "paused": "do",
        "resuming": "do",
        "stopping": "wait",
        "stopped": "already",
        "failed": "already",
    },
    "update": {
        "creating": "do",
        "running": "do",
        "pausing": "do",
        "paused": "do",
        "resuming": "do",
        "stopping": "refuse",
        "stopped": "refuse",
        "failed": "refuse",
    },
    # A pack or a fork: whether its processes stand or run makes no difference to a disk.
    "snapshot": {
        "creating": "wait",
        "running": "do",
        "pausing": "do",
        "paused": "do",
        "resuming": "do",
        "stopping": "refuse",
        "stopped": "refuse",
        "failed": "refuse",
    },
}


_RECORD = Record()


class IllegalMove(AssertionError):
    """An event came that the state forbids: a bug of the rim. Carries the story."""

    def __init__(self, event: Event, status: Status) -> None:
        lines = "\n".join(f"  {line.at:.3f} {line.event}: {line.before} -> {line.after} {line.detail}" for line in status.story)
        super().__init__(f"{event} is illegal in state {status.state}; the story:\n{lines}")
        self.story = list(status.story)


class Status(msgspec.Struct, kw_only=True):
    """All of a sandbox that changes, as the journal keeps it. Times are Unix seconds."""

    state: SandboxState = "creating"
    generation: int = 1
    cause: FailureCause | None = None
    detail: str = ""
    stop_reason: StopReason | None = None
    told: bool = False
    """Its creator was, or is about to be, told of it. What a restart finds untold is nobody's."""
    clean: bool = False
    """Nothing of it is left on the host."""
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    idle_since: float | None = None
    """When the last activity ended, moved on by pauses. Meaningless while something is active."""
    paused_at: float | None = None
    paused_seconds: float = 0.0
    """All pauses that are over."""
    ttl_running_stop: float | None = None
    ttl_max: float | None = None
    ttl_paused_stop: float | None = None
    oom_at: float | None = None
    labels: dict[str, str] = {}
    create_ms: float | None = None
    story: list[StoryLine] = []


class Machine:
    """One sandbox's status and the only code that changes it."""

    __slots__ = ("_lost_early", "active", "destroying", "status")

    def __init__(self, status: Status) -> None:
        self.status = status
        self.active = 0
        """Running commands that are not in the background, and open streams and tunnels. Not kept over a restart."""
        self.destroying = False
        """A Destroy was given out and not yet answered."""
        self._lost_early: Lost | InitDied | None = None

    # -- questions

    def outcome(self, verb: Verb) -> Outcome:
        """What `verb` means now; raises the typed error where it is refused."""
        outcome = OUTCOMES[verb][self.status.state]
        if outcome == "refuse":
            raise self.refusal()
        return outcome

    def refusal(self) -> DSecError:
        """Why nothing can be asked of a sandbox that is over."""
        status = self.status
        if status.state == "failed":
            detail = f": {status.detail}" if status.detail else ""
            return SandboxFailed(f"the sandbox failed ({status.cause}){detail}", cause=status.cause, ran="not-run")
        return Conflict(f"the sandbox is {status.state} ({status.stop_reason})", cause=status.state)

    def deadline(self) -> float | None:
        """When the next Tick is due; None: never, as things stand. Pausing and resuming have none: their clocks stand still."""
        status = self.status
        if status.state == "running":
            due: float | None = None
            if status.ttl_max is not None and status.started_at is not None:
                due = status.started_at + status.paused_seconds + status.ttl_max
            if status.ttl_running_stop is not None and self.active == 0 and status.idle_since is not None:
                idle = status.idle_since + status.ttl_running_stop
                due = idle if due is None or idle < due else due
            return due
        if status.state == "paused" and status.ttl_paused_stop is not None and status.paused_at is not None:
            return status.paused_at + status.ttl_paused_stop
        return None

    def idle_seconds(self, now: float) -> float | None:
        """How long the idle clock has run; None where it does not run at all."""
        status = self.status
        if status.idle_since is None or status.state in ("stopping", "stopped", "failed"):
            return None
        if self.active:
            return 0.0
        return max(0.0, (status.paused_at if status.paused_at is not None else now) - status.idle_since)

    # -- activity: the hot path, plain calls

    def begin_activity(self) -> None:
        """Something that is not in the background began to run or to stream."""
        self.active += 1

    def end_activity(self, now: float) -> None:
        """It ended; with the last one the idle clock starts anew."""
        if self.active <= 0:
            raise AssertionError("activity ended more often than it began")
        self.active -= 1
        self.touch(now)

    def touch(self, now: float) -> None:
        """Activity without a length. In a pause it counts from the start of the pause, since the clock stands still."""
        status = self.status
        if status.idle_since is not None:
            status.idle_since = status.paused_at if status.paused_at is not None else now

    # -- events

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take `event` at `now`; returns what the rim must do, in this order. Raises IllegalMove."""
        status = self.status
        state = status.state
        match event:
            case Tick():
                return self._tick(now)
            case StopWanted():
                return self._stop(event.reason, now)
            case TtlSet():
                return self._set_ttl(event, now)
            case OomKilled():
                return self._oom(now)
            case Lost() | InitDied():
                return self._lost(event, now)
            case Launched() if state == "creating":
                status.started_at = status.idle_since = now
                self._move("running", "launched", now)
                if self._lost_early is not None:
                    return [_RECORD, *self._lost(self._lost_early, now)]
                return [_RECORD]
            case LaunchFailed() if state == "creating":
                self._fail(event.cause, event.detail, "launch-failed", now)
                status.clean = True
                return [_RECORD]
            case PauseWanted() if state == "running":
                status.paused_at = now
                self._move("pausing", "pause-wanted", now)
                return [_RECORD, Pause()]
            case Paused() if state == "pausing":
                self._move("paused", "paused", now)
                return [_RECORD]
            case Restarted() if state in ("pausing", "resuming"):
                # Whoever asked is gone; running is the state that serves the next request soonest, and both verbs may be repeated.
                self._move("resuming", "restarted", now)
                return [_RECORD, Resume()]
            case PauseFailed() if state == "pausing":
                self._clocks_go_on(now)
                self._move("running", "pause-failed", now, event.detail)
                return [_RECORD]
            case ResumeWanted() if state == "paused":
                self._move("resuming", "resume-wanted", now)
                return [_RECORD, Resume()]
            case Resumed() if state == "resuming":
                self._clocks_go_on(now)
                if event.new_life:
                    status.generation += 1
                self._move("running", "resumed", now)
                return [_RECORD]
            case ResumeFailed() if state == "resuming":
                self._move("paused", "resume-failed", now, event.detail)
                return [_RECORD]
            case Launched() | LaunchFailed() | Paused() | PauseFailed() | Resumed() | ResumeFailed() if state in ("stopping", "failed"):
                # The answer to something that a stop or a failure overtook.
                return []
            case Destroyed() if self.destroying:
                return self._destroyed(now)
            case DestroyFailed() if self.destroying:
                self.destroying = False
                if state == "stopping":
                    status.detail = f"not all of it could be removed: {event.detail}"
                self._move(state, "destroy-failed", now, event.detail)
                return [_RECORD]
            case RetryDestroy() if state in ("stopping", "failed"):
                if self.destroying or status.clean:
                    return []
                self.destroying = True
                return [Destroy()]
        raise IllegalMove(event, status)

    def _move(self, after: SandboxState, event: str, now: float, detail: str = "") -> None:
        status = self.status
        story = status.story
        if len(story) >= STORY_LINES:
            del story[0]
        story.append(StoryLine(at=now, event=event, before=status.state, after=after, detail=detail))
        status.state = after

    def _clocks_go_on(self, now: float) -> None:
        status = self.status
        assert status.paused_at is not None
        pause = max(0.0, now - status.paused_at)
        status.paused_at = None
        status.paused_seconds += pause
        if status.idle_since is not None:
            status.idle_since += pause

    def _fail(self, cause: FailureCause, detail: str, event: str, now: float) -> None:
        status = self.status
        status.cause = cause
        status.detail = detail
        status.ended_at = now
        status.paused_at = None
        self._move("failed", event, now, detail)

    def _stop(self, reason: StopReason, now: float) -> list[Instruction]:
        status = self.status
        if status.state in ("stopping", "stopped", "failed"):
            return []
        launching = status.state == "creating"
        status.stop_reason = reason
        status.paused_at = None
        self.destroying = True
        self._move("stopping", "stop-wanted", now, reason)
        return [_RECORD, CancelLaunch(), Destroy()] if launching else [_RECORD, Destroy()]

    def _destroyed(self, now: float) -> list[Instruction]:
        status = self.status
        self.destroying = False
        status.clean = True
        if status.state == "stopping":
            status.ended_at = now
            status.detail = ""
            self._move("stopped", "destroyed", now)
        else:
            self._move("failed", "destroyed", now)
        return [_RECORD]

    def _lost(self, event: Lost | InitDied, now: float) -> list[Instruction]:
        status = self.status
        if status.state == "creating":
            # The launch itself will say more; if it succeeds after all, this counts.
            self._lost_early = event
            return []
        if status.state in ("stopping", "stopped", "failed"):
            return []
        cause: FailureCause
        if status.oom_at is not None and now - status.oom_at <= OOM_WINDOW_SECONDS:
            cause = "oom"
        else:
            cause = "init-died" if isinstance(event, InitDied) else event.cause
        self._fail(cause, event.detail, "init-died" if isinstance(event, InitDied) else "lost", now)
        self.destroying = True
        return [_RECORD, Destroy()]

    def _oom(self, now: float) -> list[Instruction]:
        status = self.status
        if status.state == "stopped":
            return []
        status.oom_at = now
        # The kernel's count may reach us after the death that it explains.
        if (
            status.state == "failed"
            and status.cause in ("init-died", "channel-closed")
            and status.ended_at is not None
            and now - status.ended_at <= OOM_WINDOW_SECONDS
        ):
            status.cause = "oom"
            self._move("failed", "oom-killed", now)
            return [_RECORD]
        return []

    def _set_ttl(self, event: TtlSet, now: float) -> list[Instruction]:
        if self.status.state in ("stopping", "stopped", "failed"):
            raise self.refusal()
        for name, value in (("ttl_running_stop", event.running_stop), ("ttl_max", event.maximum), ("ttl_paused_stop", event.paused_stop)):
            if value is not None:
                setattr(self.status, name, None if value < 0 else value)
        self.touch(now)
        return [_RECORD]

    def _tick(self, now: float) -> list[Instruction]:
        due = self.deadline()
        if due is None or now < due:
            return []
        status = self.status
        if status.state == "paused":
            return self._stop("idle", now)
        hard = status.ttl_max is not None and status.started_at is not None
        if hard and now >= status.started_at + status.paused_seconds + status.ttl_max:  # type: ignore[operator]
            return self._stop("ttl-max", now)
        return self._stop("idle", now)

    def validate_state(self) -> None:
        """Assert what must hold between any two events; the tests call it after each."""
        status = self.status
        state = status.state
        assert (status.cause is not None) == (state == "failed"), "a cause is what failed has"
        assert (status.ended_at is not None) == (state in ("stopped", "failed")), "only what is over has an end"
        assert (status.stop_reason is not None) == (state in ("stopping", "stopped")), "a stop has a reason"
        assert (status.paused_at is not None) == (state in ("pausing", "paused", "resuming")), "the pause clock runs in pauses"
        assert status.generation >= 1, "lives are counted from one"
        assert self.active >= 0, "activity is counted"
        assert status.paused_seconds >= 0, "pauses have a length"
        if state in ("running", "pausing", "paused", "resuming"):
            assert status.started_at is not None, "what runs was started"
            assert status.idle_since is not None, "what runs has an idle clock"
        if state == "stopped":
            assert status.clean, "stopped means that nothing is left"
        assert not (status.clean and self.destroying), "what is clean is not destroyed again"
        assert not status.clean or state in ("stopped", "failed"), "only what is over is clean"
        assert len(status.story) <= STORY_LINES, "the story is a ring"
        assert not status.story or status.story[-1].after == state, "the story ends in the present"
