"""What the machines take and what they order: events in, instructions out."""

from __future__ import annotations

from dataclasses import dataclass

from libdsec.schema import FailureCause, StopReason

__all__ = [
    "CancelLaunch",
    "Destroy",
    "DestroyFailed",
    "Destroyed",
    "Event",
    "InitDied",
    "Instruction",
    "LaunchFailed",
    "Launched",
    "Lost",
    "OomKilled",
    "Pause",
    "PauseFailed",
    "PauseWanted",
    "Paused",
    "Record",
    "Restarted",
    "Resume",
    "ResumeFailed",
    "ResumeWanted",
    "Resumed",
    "RetryDestroy",
    "StopWanted",
    "Tick",
    "TtlSet",
]

# -- events


@dataclass(frozen=True, slots=True)
class Launched:
    """The backend made it."""


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """The backend could not make it and has undone what it did."""

    cause: FailureCause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PauseWanted:
    """A request; legal where OUTCOMES says `do`."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The backend paused it."""


@dataclass(frozen=True, slots=True)
class PauseFailed:
    """The backend could not pause it; it runs on."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class ResumeWanted:
    """A request; legal where OUTCOMES says `do`."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The backend resumed it; `new_life` where what runs now is a restored copy, which old handles must not reach."""

    new_life: bool = False


@dataclass(frozen=True, slots=True)
class ResumeFailed:
    """The backend could not resume it; it stays paused."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A request, a time limit or the sweep. Legal everywhere; where it is already ending, nothing new happens."""

    reason: StopReason = "requested"


@dataclass(frozen=True, slots=True)
class Destroyed:
    """The backend removed all of it."""


@dataclass(frozen=True, slots=True)
class DestroyFailed:
    """The backend gave up for now; something is left."""

    detail: str


@dataclass(frozen=True, slots=True)
class RetryDestroy:
    """From the sweep: try again what DestroyFailed left."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The sandbox is gone, by no wish of ours: the channel closed, the store or the node was lost."""

    cause: FailureCause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class InitDied:
    """The first process inside ended: nothing of the sandbox is left alive."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class OomKilled:
    """The memory limit killed a process inside. Alone it ends nothing."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class TtlSet:
    """New time limits; None leaves one as it is, -1 removes it."""

    running_stop: float | None = None
    maximum: float | None = None
    paused_stop: float | None = None


@dataclass(frozen=True, slots=True)
class Restarted:
    """The edge was restarted while this was pausing or resuming."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Launched
    | LaunchFailed
    | PauseWanted
    | Paused
    | PauseFailed
    | ResumeWanted
    | Resumed
    | ResumeFailed
    | StopWanted
    | Destroyed
    | DestroyFailed
    | RetryDestroy
    | Restarted
    | Lost
    | InitDied
    | OomKilled
    | TtlSet
    | Tick
)


# -- instructions


@dataclass(frozen=True, slots=True)
class Record:
    """Write the status to the journal and wake who waits for the state to change."""


@dataclass(frozen=True, slots=True)
class CancelLaunch:
    """Stop the launch that is under way; the backend undoes it."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause it; report Paused or PauseFailed."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume it; report Resumed or ResumeFailed."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """After whatever the backend is doing with it now: settle its commands, remove it, report Destroyed or DestroyFailed."""


Instruction = Record | CancelLaunch | Pause | Resume | Destroy
