"""A sandbox's handle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from libdsec.api import Api, new_op_id, segment
from libdsec.bodies import check_seconds, stdin_bytes
from libdsec.errors import ConnectionFailed, DSecError, InvalidArgument, NotFound, error_from_wire
from libdsec.files import Files
from libdsec.packs import WAIT_SECONDS, await_pack
from libdsec.ports import PortHttp, TcpConnection
from libdsec.process import Process
from libdsec.schema import (
    DEFAULT_OUTPUT_LIMIT_BYTES,
    BatchResult,
    CreateRequest,
    ExecRequest,
    ExecResult,
    ForkRequest,
    PackInfo,
    PackRequest,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
    SessionRequest,
    UpdateRequest,
)
from libdsec.session import Session
from libdsec.shielding import finish

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Sandbox"]

MAX_COUNT = 32768
_CREATE_AFTER_CANCEL_SECONDS = 5.0
"""How long a cancelled create is still waited for, to know what it made and stop it, before its connection is closed instead."""
_HOLD_SECONDS = 2
"""How long the output of a started process waits for output() before some of it may be dropped."""


class Sandbox:
    """A sandbox. `async with` stops it at the end, also on an error or a cancellation.

    `created` is what the server said when the handle was made; info() asks again.
    """

    sandbox_id: str
    created: SandboxInfo
    files: Files

    def __init__(self, api: Api, info: SandboxInfo) -> None:
        self._api = api
        self._path = f"/v1/sandboxes/{segment(info.sandbox_id)}"
        self._exec_path = self._path + "/exec"
        self.created = info
        self.files = Files(api, self._path)
        self.sandbox_id = info.sandbox_id

    def __repr__(self) -> str:
        return f"<Sandbox {self.sandbox_id}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await finish(self.stop())

    async def info(self) -> SandboxInfo:
        """State, story and what it uses now."""
        return await self._api.call("GET", self._path, SandboxInfo, idempotent=True)

    async def update(
        self,
        *,
        ttl_running_stop: float | None = None,
        ttl_max: float | None = None,
        ttl_paused_stop: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SandboxInfo:
        """Change time limits (-1 removes one) and labels; None leaves as it is."""
        request = UpdateRequest(
            ttl_running_stop=ttl_running_stop,
            ttl_max=ttl_max,
            ttl_paused_stop=ttl_paused_stop,
            labels=dict(labels) if labels is not None else None,
        )
        return await self._api.call("PATCH", self._path, SandboxInfo, body=request, idempotent=True)

    async def pause(self) -> SandboxInfo:
        """Freeze all its processes. Commands sent to it meanwhile resume it or are refused, as the server's backend has it."""
        return await self._api.call("POST", self._path + "/pause", SandboxInfo, idempotent=True)

    async def resume(self) -> SandboxInfo:
        """Thaw it."""
        return await self._api.call("POST", self._path + "/resume", SandboxInfo, idempotent=True)

    async def stop(self) -> SandboxInfo:
        """End it and remove all of it. Stopping again gives the same answer."""
        return await self._api.call("DELETE", self._path, SandboxInfo, idempotent=True)

    async def fork(
        self,
        count: int = 1,
        *,
        timeout: float | None = None,
        allow_partial: bool = False,
        memory_limit_mb: int | None = None,
        cpu_cores_limit: float | None = None,
        pids_limit: int | None = None,
        disk_limit_mb: int | None = None,
        ttl_running_stop: float | None = None,
        ttl_max: float | None = None,
        ttl_paused_stop: float | None = None,
        network: Literal["none", "nat"] | None = None,
        init_user: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        hostname: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[Sandbox]:
        """Make `count` sandboxes on its node that begin with the files that it has now, ready for commands. It goes on meanwhile.

        Each has its own id, limits, host name and machine id; no process, socket, session or record is inherited. What is not given is as
        it was asked for this one; `env` and `labels` are added to its own, -1 removes a time limit. Failures as in DSecClient.run_many().
        """
        request = ForkRequest(
            count=check_count(count),
            memory_limit_mb=memory_limit_mb,
            cpu_cores_limit=cpu_cores_limit,
            pids_limit=pids_limit,
            disk_limit_mb=disk_limit_mb,
            ttl_running_stop=ttl_running_stop,
            ttl_max=ttl_max,
            ttl_paused_stop=ttl_paused_stop,
            network=network,
            init_user=init_user,
            env=dict(env or {}),
            workdir=workdir,
            hostname=hostname,
            labels=dict(labels or {}),
        )
        seconds = self._api.timeouts.create if timeout is None else timeout
        return await make(self._api, self._path + "/fork", request, seconds, allow_partial=allow_partial)

    async def pack_diff(
        self,
        name: str,
        *,
        kind: Literal["snapshot", "workspace", "toolkit"] = "snapshot",
        scrub: Iterable[str] = (),
        default_scrub: bool = True,
        wait: bool = True,
        timeout: float | None = None,
        op_id: str | None = None,
    ) -> PackInfo:
        """Publish what it has written as a layer, `name` or `name:tag`. Its processes stand for milliseconds, the rest is done meanwhile.

        A sandbox from a snapshot (DSecClient.restore, or as its image) has all its files; a workspace or toolkit is the difference alone,
        for any base. Left out are temporary files, downloaded packages and shell histories, unless `default_scrub` is False, and what the
        globs in `scrub` mean.

        Returns when it is published, or with `wait=False` when the snapshot is taken: then ask DSecClient.pack() by the answer's op_id.
        Past `timeout` seconds, or cancelled, it goes on too. Repeating an `op_id` packs nothing and gives its record.
        """
        base, _, tag = name.partition(":")
        request = PackRequest(
            name=base,
            tag=tag or "latest",
            kind=kind,
            scrub=list(scrub),
            default_scrub=default_scrub,
            op_id=op_id or new_op_id("pack"),
        )
        query = {"wait": WAIT_SECONDS} if wait and (timeout is None or timeout > WAIT_SECONDS) else None
        seconds = self._api.timeouts.request + WAIT_SECONDS
        info = await self._api.call(
            "POST", self._path + "/pack-diff", PackInfo, body=request, query=query, timeout=seconds, idempotent=True
        )
        return await await_pack(self._api, info, timeout) if wait else info

    async def run_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        kill_grace: float = 2.0,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
        rlimits: Mapping[str, list[int]] | None = None,
        op_id: str | None = None,
    ) -> ExecResult:
        """Run text in the image's bash, or sh, and wait. A nonzero exit is data: see ExecResult.check().

        Past `timeout` seconds the command's whole tree is ended and the result says `timed_out`, with the output so far. Cancelling stops
        waiting, not the command: keep `op_id` and ask result(op_id). OutcomeUnknown where the server was lost and did not come back.
        """
        request = _request(None, command, cwd, user, env, stdin, timeout, kill_grace, output_limit_bytes, rlimits, op_id)
        return await self._run(request)

    async def exec(
        self,
        argv: list[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        kill_grace: float = 2.0,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
        rlimits: Mapping[str, list[int]] | None = None,
        op_id: str | None = None,
    ) -> ExecResult:
        """Run a program with its arguments, no shell between, and wait. As run_shell() otherwise."""
        request = _request(argv, None, cwd, user, env, stdin, timeout, kill_grace, output_limit_bytes, rlimits, op_id)
        return await self._run(request)

    async def start(
        self,
        argv: list[str] | None = None,
        *,
        shell: str | None = None,
        background: bool = False,
        open_stdin: bool = False,
        tty: bool = False,
        rows: int = 24,
        cols: int = 80,
        timeout: float | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        kill_grace: float = 2.0,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
        rlimits: Mapping[str, list[int]] | None = None,
        op_id: str | None = None,
    ) -> Process:
        """Start a program, or with `shell` a text, and return at once.

        `background` is for services: the sandbox's idle clock does not count them. `open_stdin` lets write_stdin() feed it; `tty` gives
        it a terminal of `rows` and `cols`, with all output in stream 1.
        """
        request = _request(argv, shell, cwd, user, env, stdin, timeout, kill_grace, output_limit_bytes, rlimits, op_id)
        request.background = background
        request.open_stdin = open_stdin or tty
        request.tty = tty
        request.rows = rows
        request.cols = cols
        # An id runs once at most, so a repeated request is answered with the first one's process.
        query = None if background else {"hold": _HOLD_SECONDS}
        info = await self._api.call("POST", self._path + "/processes", ProcessInfo, body=request, query=query, idempotent=True)
        return Process(self._api, self._path, info)

    async def process(self, op_id: str) -> Process:
        """A handle on a command by its id, also on one that has ended. NotFound where there is none."""
        info = await self._api.call("GET", f"{self._path}/processes/{segment(op_id)}", ProcessInfo, idempotent=True)
        return Process(self._api, self._path, info)

    async def processes(self) -> list[ProcessInfo]:
        """All commands, running and ended."""
        return await self._api.call("GET", self._path + "/processes", list[ProcessInfo], idempotent=True)

    async def result(self, op_id: str, *, wait: float = 0.0) -> ExecResult:
        """The recorded result of a command. Conflict with cause `running` where it has not ended within `wait` seconds."""
        check_seconds(wait=wait)
        return await self._api.call(
            "GET",
            f"{self._path}/processes/{segment(op_id)}/result",
            ExecResult,
            query={"wait": wait},
            timeout=self._api.timeouts.request + wait,
            idempotent=True,
        )

    async def open_session(
        self,
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Open a shell that keeps its directory and environment between commands. Repeating a `session_id` opens no other."""
        request = SessionRequest(user=user, cwd=cwd, env=dict(env) if env else {}, session_id=session_id or new_op_id("ss"))
        info = await self._api.call("POST", self._path + "/sessions", SessionInfo, body=request, idempotent=True)
        return Session(self._api, self._path, info)

    async def sessions(self) -> list[SessionInfo]:
        """Sessions, open and closed."""
        return await self._api.call("GET", self._path + "/sessions", list[SessionInfo], idempotent=True)

    async def session(self, session_id: str) -> Session:
        """A handle on an open session. NotFound where there is none."""
        for info in await self.sessions():
            if info.session_id == session_id and info.state == "open":
                return Session(self._api, self._path, info)
        raise NotFound(f"no open session {session_id}", field="session_id")

    def tcp(self, port: int) -> TcpConnection:
        """A connection to a port on the sandbox's loopback: `async with sandbox.tcp(8000) as connection`."""
        return TcpConnection(self._api, f"{self._path}/ports/{port}")

    def http(self, port: int) -> PortHttp:
        """HTTP to a port on the sandbox's loopback: `await sandbox.http(8000).get("/")`."""
        return PortHttp(self._api, f"{self._path}/ports/{port}/http")

    async def _run(self, request: ExecRequest) -> ExecResult:
        assert request.op_id is not None, "_request gives every command an id"
        seconds = None if request.timeout is None else request.timeout + request.kill_grace
        return await self._api.run(self._exec_path, self._path, request, request.op_id, seconds)


def check_count(count: int) -> int:
    """`count` itself, or InvalidArgument."""
    if not 1 <= count <= MAX_COUNT:
        raise InvalidArgument(f"count is {count}; at least 1 and at most {MAX_COUNT}", field="count")
    return count


async def make(api: Api, path: str, request: CreateRequest | ForkRequest, timeout: float, *, allow_partial: bool) -> list[Sandbox]:
    """The sandboxes that `request` makes. Unless `allow_partial`, all of them or none.

    After an error, a timeout or a cancellation nothing of them stays.
    """
    check_seconds(timeout=timeout)
    batch = await _post(api, path, request, timeout)
    made = [Sandbox(api, info) for info in batch.sandboxes]
    if batch.errors and not (allow_partial and made):
        await finish(_stop_all(made))
        error = error_from_wire({"error": msgspec.to_builtins(batch.errors[0])}, 500)
        error.details.update(made=len(made), failed=len(batch.errors))
        raise error
    return made


async def _post(api: Api, path: str, request: CreateRequest | ForkRequest, timeout: float) -> BatchResult:
    key = {"Idempotency-Key": new_op_id("create")}
    posting = asyncio.ensure_future(api.call("POST", path, BatchResult, body=request, headers=key, timeout=timeout, idempotent=True))
    try:
        return await asyncio.shield(posting)
    except asyncio.CancelledError:
        # Closing the connection makes the server undo a create that it is at, but not one whose answer is on its way.
        # Who cancels again does not want to wait.
        await finish(_undo(api, posting), patience=0)
        raise


async def _undo(api: Api, posting: asyncio.Future[BatchResult]) -> None:
    try:
        batch = await asyncio.wait_for(posting, _CREATE_AFTER_CANCEL_SECONDS)
    except (TimeoutError, DSecError):
        return
    await _stop_all([Sandbox(api, info) for info in batch.sandboxes])


async def _stop_all(sandboxes: list[Sandbox]) -> None:
    results = await asyncio.gather(*(each.stop() for each in sandboxes), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed and not all(isinstance(each, ConnectionFailed) for each in failed):
        raise failed[0]


def _request(
    argv: list[str] | None,
    shell: str | None,
    cwd: str | None,
    user: str | None,
    env: Mapping[str, str] | None,
    stdin: bytes | str | None,
    timeout: float | None,
    kill_grace: float,
    output_limit_bytes: int,
    rlimits: Mapping[str, list[int]] | None,
    op_id: str | None,
) -> ExecRequest:
    if isinstance(argv, str):
        raise InvalidArgument("argv is a list of arguments; use run_shell for text", field="argv")
    check_seconds(timeout=timeout, kill_grace=kill_grace)
    return ExecRequest(
        argv=argv,
        shell=shell,
        cwd=cwd,
        user=user,
        env=dict(env) if env else {},
        stdin=stdin_bytes(stdin) if isinstance(stdin, str) else stdin,
        timeout=timeout,
        kill_grace=kill_grace,
        output_limit_bytes=output_limit_bytes,
        rlimits=dict(rlimits) if rlimits else {},
        op_id=op_id or new_op_id(),
    )
