"""A backend of dictionaries for tests of the rim alone.

The same behaviours are proved on the real container backend by tests/edge/test_restart.py and dsec.testing.self_check. It keeps the
protocol's promises that the rim leans on: what it "runs" outlives the edge object, as sandboxes outlive the daemon.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from dsec.backends.protocol import Capabilities, ChannelEvent, EventCallback, LiveSession, SandboxSpec, Usage
from dsec.environments.blobcache import StoreSettings
from dsec.environments.environment import ResolvedEnvironment, ResolvedLayer
from libdsec.errors import InvalidArgument, NotFound, SandboxFailed
from libdsec.schema import ContainerRunArgs, ExecRequest, ExecResult


@dataclass
class Command:
    request: ExecRequest | None
    background: bool = False
    result: ExecResult | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    acknowledged: bool = False
    shell: str | None = None


@dataclass
class Guest:
    """What "lives on the host" of one sandbox."""

    spec: SandboxSpec
    commands: dict[str, Command] = field(default_factory=dict)
    shells: set[str] = field(default_factory=set)
    runs: list[str] = field(default_factory=list)
    alive: bool = True
    paused: bool = False


class Host:
    """Survives the backend objects that use it."""

    def __init__(self) -> None:
        self.guests: dict[str, Guest] = {}
        self.snapshots: set[str] = set()
        self.disks: set[str] = set()
        """Of forks."""


class DoubleChannel:
    """Commands: `exit N` ends at once; `hold` runs until `DoubleBackend.end`; `bad` is refused; `echo TEXT` prints."""

    def __init__(self, backend: DoubleBackend, guest: Guest) -> None:
        self.backend = backend
        self.guest = guest
        self.closed = False

    def _check(self) -> None:
        if not self.guest.alive or self.closed:
            raise SandboxFailed("the channel is closed", cause="channel-closed")

    def _begin(self, op_id: str, text: str, request: ExecRequest | None, *, background: bool, shell: str | None = None) -> Command:
        self._check()
        if text == "bad":
            raise InvalidArgument("no such folder", field="cwd")
        command = self.guest.commands[op_id] = Command(request, background, shell=shell)
        self.guest.runs.append(op_id)
        if text.startswith("echo "):
            self.backend.finish(self.guest, op_id, 0, text[5:].encode() + b"\n")
        elif text.startswith("exit "):
            self.backend.finish(self.guest, op_id, int(text[5:]))
        return command

    async def _wait(self, op_id: str) -> ExecResult:
        self._check()
        command = self.guest.commands.get(op_id)
        if command is None or command.acknowledged:
            raise NotFound(f"no command {op_id}")
        await command.ended.wait()
        if command.result is None:
            raise SandboxFailed("the channel is closed", cause="channel-closed")
        return command.result

    async def exec(self, op_id: str, request: ExecRequest) -> ExecResult:
        self._begin(op_id, request.shell or " ".join(request.argv or []), request, background=request.background)
        return await self._wait(op_id)

    async def start(self, op_id: str, request: ExecRequest) -> LiveSession:
        self._begin(op_id, request.shell or " ".join(request.argv or []), request, background=request.background)
        return LiveSession(op_id, "command", True, 42, time.time(), request.background)

    async def wait(self, op_id, *, session_id=None) -> ExecResult:
        return await self._wait(op_id)

    async def attach(self, op_id, **_):
        raise NotFound("the double does not stream")

    async def signal(self, session_id: str, signum: int, *, tree: bool) -> None:
        self._check()
        self.backend.finish(self.guest, session_id, None, signal=signum)

    async def acknowledge(self, session_id: str, op_id: str) -> None:
        self._check()
        self.guest.commands[op_id].acknowledged = True

    async def open_session(self, session_id, request):
        self._check()
        self.guest.shells.add(session_id)
        return LiveSession(session_id, "shell", True, 43, time.time(), False)

    async def run_in_session(self, session_id, op_id, request) -> ExecResult:
        self._begin(op_id, request.shell, None, background=False, shell=session_id)
        return await self._wait(op_id)

    async def close_session(self, session_id: str) -> None:
        self._check()
        self.guest.shells.discard(session_id)

    async def sessions(self) -> list[LiveSession]:
        self._check()
        commands = [
            LiveSession(op_id, "command", command.result is None, 42, time.time(), command.background)
            for op_id, command in self.guest.commands.items()
            if command.shell is None and not command.acknowledged
        ]
        return commands + [LiveSession(session_id, "shell", True, 43, time.time(), False) for session_id in self.guest.shells]

    async def files(self, user: str):
        raise NotFound("the double has no files")

    async def connect(self, port: int, address: str = "127.0.0.1") -> int:
        raise NotFound("the double has no ports")

    async def aclose(self) -> None:
        self.closed = True


class DoubleBackend:
    name = "container"

    def __init__(self, host: Host) -> None:
        self.host = host
        self.next_range = 0
        self.create_gate: asyncio.Event | None = None
        self.destroy_gate: asyncio.Event | None = None
        self.fail_create: list[Exception] = []
        self.fail_destroy = 0
        self.fail_pause: Exception | None = None
        self.snapshot_gate: asyncio.Event | None = None
        self.fail_snapshot: Exception | None = None
        self.stuck_snapshots: set[str] = set()
        self.branch_gate: asyncio.Event | None = None
        self.launching = 0
        self.most_launching = 0
        self.on_event: EventCallback = lambda sandbox_id, event: None

    async def open(self, on_event: EventCallback) -> None:
        self.on_event = on_event

    async def aclose(self) -> None:
        self.on_event = lambda sandbox_id, event: None

    def capabilities(self) -> Capabilities:
        return Capabilities(pause=True, snapshot=True, fork=True, tty=True, nat=True, disk_limit=True, memory_limit=True)

    def validate(self, args: ContainerRunArgs) -> None:
        pass

    def lease_range(self, sandbox_id: str) -> int:
        self.next_range += 1
        return self.next_range

    async def create(self, spec: SandboxSpec) -> DoubleChannel:
        self.launching += 1
        self.most_launching = max(self.most_launching, self.launching)
        try:
            if self.create_gate is not None:
                await self.create_gate.wait()
            if self.fail_create:
                raise self.fail_create.pop()
        finally:
            self.launching -= 1
        guest = self.host.guests[spec.sandbox_id] = Guest(spec)
        return DoubleChannel(self, guest)

    async def adopt(self, spec: SandboxSpec) -> DoubleChannel | None:
        guest = self.host.guests.get(spec.sandbox_id)
        return DoubleChannel(self, guest) if guest is not None and guest.alive else None

    async def pause(self, spec: SandboxSpec) -> None:
        if self.fail_pause is not None:
            raise self.fail_pause
        self.host.guests[spec.sandbox_id].paused = True

    async def resume(self, spec: SandboxSpec) -> None:
        self.host.guests[spec.sandbox_id].paused = False

    async def snapshot(self, spec: SandboxSpec, name: str, *, branchable: bool, hurry=None) -> float:
        if self.snapshot_gate is not None:
            await self.snapshot_gate.wait()
        if self.fail_snapshot is not None:
            raise self.fail_snapshot
        self.host.snapshots.add(name)
        return 1.5

    async def branch(self, name, specs) -> dict[str, Exception]:
        assert name in self.host.snapshots
        if self.branch_gate is not None:
            await self.branch_gate.wait()
        self.host.disks |= {spec.sandbox_id for spec in specs}
        return {}

    def snapshot_folder(self, name: str) -> Path:
        return Path("/snapshots") / name / "upper"

    async def drop_snapshot(self, name: str) -> None:
        if name in self.stuck_snapshots:
            raise OSError(22, "Invalid argument")
        self.host.snapshots.discard(name)

    async def snapshots(self) -> set[str]:
        return set(self.host.snapshots)

    async def tidy(self) -> None:
        pass

    async def destroy(self, spec: SandboxSpec) -> None:
        if self.destroy_gate is not None:
            await self.destroy_gate.wait()
        if self.fail_destroy:
            self.fail_destroy -= 1
            raise OSError(16, "Device or resource busy")
        self.kill(spec.sandbox_id)
        self.host.guests.pop(spec.sandbox_id, None)
        self.host.disks.discard(spec.sandbox_id)

    async def usage(self, spec: SandboxSpec) -> Usage:
        return Usage(memory_bytes=1 << 20, cpu_seconds=0.5)

    async def owned(self) -> set[str]:
        return set(self.host.guests)

    async def destroy_unknown(self, sandbox_id: str) -> None:
        self.host.guests.pop(sandbox_id, None)

    # -- what a test does to the host

    def kill(self, sandbox_id: str) -> None:
        guest = self.host.guests.get(sandbox_id)
        if guest is not None:
            guest.alive = False
            for command in guest.commands.values():
                command.ended.set()

    def finish(self, guest: Guest, op_id: str, code: int | None, stdout: bytes = b"", signal: int | None = None) -> None:
        command = guest.commands[op_id]
        command.result = ExecResult(
            op_id=op_id, exit_code=code, signal=signal, stdout=stdout, stdout_bytes=len(stdout), wall_ms=1.0, started_at=time.time()
        )
        command.ended.set()
        if command.shell is None:
            self.on_event(guest.spec.sandbox_id, ChannelEvent("session-ended", session_id=op_id))

    def end(self, sandbox_id: str, op_id: str, code: int = 0, stdout: bytes = b"") -> None:
        self.finish(self.host.guests[sandbox_id], op_id, code, stdout)


class DoubleAccess:
    """A store on a local disk."""

    direct = True
    settings = StoreSettings()


class DoubleNode:
    def uses(self) -> dict[str, set[str]]:
        return {}


class DoubleEnvironments:
    access = DoubleAccess()
    node = DoubleNode()

    def absent(self, digests) -> bool:
        return False

    def close(self) -> None:
        pass

    def resolve(self, refs, *, field="environment") -> ResolvedEnvironment:
        if refs[0] != "debian":
            raise NotFound(f"{field}: there is no environment {refs[0]!r}", field=field)
        return ResolvedEnvironment([ResolvedLayer("debian", "sha256:" + "0" * 64, "base")], {"LANG": "C.UTF-8"}, "/srv", "", [])

    def acquire(self, digests, owner) -> list[str]:
        return [f"/layers/{digest}" for digest in digests]

    def release(self, owner) -> None:
        pass

    def sweep_mounts(self, keep_owners) -> list[str]:
        return []
