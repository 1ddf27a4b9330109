"""The one contract that every backend keeps: a sandbox is made, gives a channel, is paused, resumed and destroyed.

A backend refuses at `validate` what it cannot do, so that nothing is refused later at use. It owns the kernel objects of its sandboxes;
edge owns their states, records and time limits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from libdsec.schema import (
    BackendName,
    ContainerRunArgs,
    ExecRequest,
    ExecResult,
    FileStat,
    SessionRequest,
    SessionRunRequest,
)

__all__ = [
    "Attachment",
    "Backend",
    "Capabilities",
    "Channel",
    "ChannelEvent",
    "EventCallback",
    "FilesConversation",
    "LiveSession",
    "OpenedFile",
    "OutputChunk",
    "SandboxSpec",
    "StreamEnd",
    "Usage",
]


class SandboxSpec(msgspec.Struct, kw_only=True, frozen=True):
    """All that a backend needs to make a sandbox, and to find and destroy it after a restart. It is what the journal keeps."""

    sandbox_id: str
    generation: int
    args: ContainerRunArgs
    layers: list[str]
    """Layer refs `name@digest`, from the bottom."""
    range_index: int
    """Which uid range (dsec.resources.uid_ranges) is the sandbox's, as `Backend.lease_range` gave it; -1 where the backend needs none."""
    env: dict[str, str] = {}
    """Merged: layers from the bottom, then args.env."""
    workdir: str = "/"
    user: str = "root"
    hostname: str = "sandbox"
    backend: BackendName = "container"
    snapshot: str = ""
    """Name of the snapshot that its disk begins as: it is a fork. Empty: its disk begins empty."""
    parent: str = ""
    """The sandbox that it was forked from."""
    renewed: bool = False
    """Its files come from another sandbox's life: it gets a machine id of its own."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the backend can do on this host; what is False raises `Unsupported` at create."""

    pause: bool
    snapshot: bool
    fork: bool
    tty: bool
    nat: bool
    disk_limit: bool
    memory_limit: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox uses now; None where the host does not tell."""

    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    cpu_seconds: float | None = None
    disk_bytes: int | None = None
    oom_kills: int = 0
    pids: int | None = None


@dataclass(frozen=True, slots=True)
class LiveSession:
    """A session that aether reports: a command (its id is the op id) or a shell."""

    session_id: str
    kind: str  # "command" | "shell"
    running: bool
    pid: int | None
    started_at: float
    background: bool


@dataclass(frozen=True, slots=True)
class ChannelEvent:
    """`closed` (the channel is gone: the sandbox failed), `init-died`, `oom`, `session-ended`."""

    kind: str
    detail: str = ""
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Live output. `stream` is 1 or 2; `offset` absolute; a jump in offsets is a gap."""

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """EOF of `stream`."""

    stream: int


class Attachment(Protocol):
    """A live view of one command. Iterating yields OutputChunk and StreamEnd and ends with the ExecResult (output not in it)."""

    def __aiter__(self) -> AsyncIterator[OutputChunk | StreamEnd | ExecResult]: ...
    async def consumed(self, stream: int, count: int) -> None:
        """The reader took `count` bytes: that much more may be sent."""
        ...

    async def write_stdin(self, data: bytes) -> None:
        """Waits for credit; raises Conflict if stdin is closed."""
        ...

    async def close_stdin(self) -> None: ...
    async def signal(self, signum: int, *, tree: bool) -> None: ...
    async def resize(self, rows: int, cols: int) -> None: ...
    async def aclose(self) -> None:
        """Stop watching. The command goes on."""
        ...


@dataclass(slots=True)
class OpenedFile:
    """A descriptor of a regular file in the sandbox, opened with the guest user's rights. The holder closes it."""

    fd: int
    stat: FileStat
    token: int = 0


class FilesConversation(Protocol):
    """File operations as one user, resolved in the sandbox's own root. Closing aborts writes that were not committed."""

    async def stat(self, path: str, *, follow: bool = False) -> FileStat: ...
    def list(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileStat]: ...
    async def open_read(self, path: str) -> OpenedFile: ...
    async def open_write(
        self, path: str, *, mode: int | None = None, uid: int | None = None, gid: int | None = None, parents: bool = False
    ) -> OpenedFile: ...
    async def commit(self, opened: OpenedFile, path: str) -> None: ...
    async def abort(self, opened: OpenedFile) -> None: ...
    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None: ...
    async def move(self, path: str, target: str, *, overwrite: bool = False) -> None: ...
    async def remove(self, path: str, *, recursive: bool = False) -> None: ...
    async def set_attributes(
        self, path: str, *, mode: int | None = None, uid: int | None = None, gid: int | None = None, mtime_ns: int | None = None
    ) -> None: ...
    async def symlink(self, target: str, path: str) -> None: ...
    def watch(self, path: str) -> AsyncIterator[tuple[int, str]]:
        """(inotify mask, name) until closed."""
        ...

    async def aclose(self) -> None: ...


class Channel(Protocol):
    """The way into one live sandbox. All calls raise SandboxFailed(cause="channel-closed") when it is gone."""

    async def exec(self, op_id: str, request: ExecRequest) -> ExecResult:
        """Run and wait. Cancelling stops waiting, not the command. Output is in the result."""
        ...

    async def start(self, op_id: str, request: ExecRequest) -> LiveSession: ...
    async def attach(
        self, op_id: str, *, session_id: str | None = None, stdout_offset: int = 0, stderr_offset: int = 0, credit: int = 4 << 20
    ) -> Attachment: ...
    async def wait(self, op_id: str, *, session_id: str | None = None) -> ExecResult:
        """Attach without live output; the result with what was kept. NotFound if aether does not know it."""
        ...

    async def signal(self, session_id: str, signum: int, *, tree: bool) -> None: ...
    async def acknowledge(self, session_id: str, op_id: str) -> None:
        """The result is recorded: aether may forget it. Follows every `exec`, `run_in_session` and `wait`, a few milliseconds later.

        Frequent: a channel may keep the conversation that brought the result for it.
        """
        ...

    async def open_session(self, session_id: str, request: SessionRequest) -> LiveSession: ...
    async def run_in_session(self, session_id: str, op_id: str, request: SessionRunRequest) -> ExecResult: ...
    async def close_session(self, session_id: str) -> None: ...
    async def sessions(self) -> list[LiveSession]: ...
    async def files(self, user: str) -> FilesConversation: ...
    async def connect(self, port: int, address: str = "127.0.0.1") -> int:
        """A connected, non-blocking TCP socket's descriptor, made in the sandbox's network namespace."""
        ...

    async def aclose(self) -> None:
        """Let go without ending the sandbox."""
        ...


EventCallback = Callable[[str, ChannelEvent], None]
"""Called in the event loop with (sandbox_id, event)."""


class Backend(Protocol):
    """Makes and ends sandboxes of one kind."""

    name: BackendName

    async def open(self, on_event: EventCallback) -> None: ...
    async def aclose(self) -> None:
        """Let go of everything; sandboxes live on."""
        ...

    def capabilities(self) -> Capabilities: ...
    def validate(self, args: ContainerRunArgs) -> None: ...
    def lease_range(self, sandbox_id: str) -> int:
        """A uid range that no live sandbox of this host has, -1 where none is needed; edge puts it in the spec before the journal has it.

        Overloaded when all are taken. It is free again after `destroy` or a `create` that failed; `adopt` takes it anew.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Channel:
        """Ready to run commands on return. On any failure everything made is undone and a typed error raised."""
        ...

    async def adopt(self, spec: SandboxSpec) -> Channel | None:
        """Find a living sandbox again after a restart; None if it is dead."""
        ...

    async def pause(self, spec: SandboxSpec) -> None: ...
    async def resume(self, spec: SandboxSpec) -> None:
        """Its processes run on. Nothing happens to one whose processes run."""
        ...

    async def destroy(self, spec: SandboxSpec) -> None:
        """End it in whatever state it is and remove every kernel object and file of it.

        Idempotent; raises after a bounded retry if something stays.
        """
        ...

    async def snapshot(self, spec: SandboxSpec, name: str, *, branchable: bool, hurry: Callable[[], bool] | None = None) -> float:
        """Keep the sandbox's disk as of one moment under `name`, with all that its processes have written until then.

        They stand for the milliseconds that are returned; one that is paused stays so. Nothing is left after a failure. `branchable`: new
        sandboxes may begin with it (`SandboxSpec.snapshot`); otherwise it is for reading. `hurry` is asked, in any thread, before more is
        written out ahead: once it is true the rest is written while they stand.
        """
        ...

    async def branch(self, name: str, specs: Sequence[SandboxSpec]) -> dict[str, Exception]:
        """Make the disks of `specs`, which are about to be created, from a branchable snapshot, all at once.

        Returns why those of them that have none have none; `create` then tries again.
        """
        ...

    def snapshot_folder(self, name: str) -> Path:
        """Where the files that the sandbox had written lie, as an overlay's upper folder."""
        ...

    async def drop_snapshot(self, name: str) -> None:
        """Remove it. Idempotent."""
        ...

    async def snapshots(self) -> set[str]:
        """Names of all that there are. For the sweep."""
        ...

    async def tidy(self) -> None:
        """Remove what the kernel keeps of sandboxes that are no more, and that is nobody's. From time to time."""
        ...

    async def usage(self, spec: SandboxSpec) -> Usage: ...
    async def owned(self) -> set[str]:
        """Ids of all sandboxes of which this host holds anything: sockets, cgroups, scratch folders, veths. For the sweep."""
        ...

    async def destroy_unknown(self, sandbox_id: str) -> None:
        """Remove what `owned` found and no journal knows."""
        ...
