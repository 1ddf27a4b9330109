"""The wire schema: what the REST API takes and gives, as msgspec structs.

Bodies are MessagePack (`application/vnd.msgpack`, what the SDK speaks; bytes stay bytes) or JSON (bytes are base64). Sizes are in the unit
of the name, times are Unix seconds as float unless the name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from libdsec.errors import CommandFailed

__all__ = [
    "BatchResult",
    "ContainerRunArgs",
    "CreateRequest",
    "EnvironmentInfo",
    "ErrorBody",
    "ExecRequest",
    "ExecResult",
    "FailureCause",
    "FileStat",
    "ForkRequest",
    "LayerInfo",
    "NodeInfo",
    "PackInfo",
    "PackRequest",
    "ProcessInfo",
    "SandboxInfo",
    "SandboxState",
    "SessionInfo",
    "SessionRequest",
    "SessionRunRequest",
    "SignalRequest",
    "StoryLine",
    "StreamOutput",
    "UpdateRequest",
]

SandboxState = Literal["creating", "running", "pausing", "paused", "resuming", "stopping", "stopped", "failed"]
FailureCause = Literal[
    "oom",
    "disk",
    "init-died",
    "channel-closed",
    "store-lost",
    "node-lost",
    "policy-not-in-force",
    "launch-failed",
]
BackendName = Literal["fncall", "container", "microvm", "fullvm"]
LayerKind = Literal["base", "workspace", "toolkit", "snapshot"]
StopReason = Literal["requested", "idle", "ttl-max", "failed", "sweep"]

DEFAULT_OUTPUT_LIMIT_BYTES = 4 << 20
MAX_OUTPUT_LIMIT_BYTES = 256 << 20


class ContainerRunArgs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a container sandbox is made of. The published names keep their published meaning."""

    container_image: str = ""
    """Name of the base environment, `name`, `name:tag` or `name@digest`. Or give `environment`."""
    environment: list[str] = []
    """Layers from the bottom: base, workspaces, toolkits, each `name`, `name:tag` or `name@digest`. Excludes `container_image`
    unless that is its first element."""
    memory_limit_mb: int = 4096
    """More than the host has is refused; the default is lowered to what the host has."""
    cpu_cores_limit: float = 4.0
    """CPU cores, fractions allowed, e.g. 0.5. More than the host has is refused; the default is lowered to what the host has."""
    pids_limit: int = 4096
    disk_limit_mb: int = 10240
    """What the sandbox may write to its own disk; past it, EDQUOT (or ENOSPC) inside. More than the host's disk is refused, but for the
    default."""
    ttl_running_stop: float | None = None
    """Idle seconds after which the sandbox is stopped. A running exec is activity. None: never."""
    ttl_max: float | None = None
    """Seconds of life after which the sandbox is stopped, busy or not. None: never."""
    ttl_paused_stop: float | None = None
    """Seconds a sandbox may stay paused before it is stopped. None: never."""
    network: Literal["none", "nat"] = "none"
    network_rules: dict[str, bool] = {}
    """Published allowlist by service. Only False values are accepted until the allowlist exists."""
    init_user: str = ""
    """User that commands run as unless they name one: `name`, `uid`, `name:group` or `uid:gid`; empty: the environment's own, else root."""
    env: dict[str, str] = {}
    workdir: str = ""
    """Working directory of commands; empty: the environment's own, else `/`."""
    hostname: str = ""
    labels: dict[str, str] = {}


class CreateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sandboxes. `count` sandboxes of one kind in one request."""

    args: ContainerRunArgs
    backend: BackendName = "container"
    count: Annotated[int, msgspec.Meta(ge=1, le=32768)] = 1


class StoryLine(msgspec.Struct, kw_only=True):
    """One transition of a sandbox's state machine."""

    at: float
    event: str
    before: SandboxState
    after: SandboxState
    detail: str = ""


class SandboxInfo(msgspec.Struct, kw_only=True):
    """A sandbox as the server knows it. `generation` counts its lives: a handle of an older one is refused."""

    sandbox_id: str
    backend: BackendName
    state: SandboxState
    generation: int = 1
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    cause: FailureCause | None = None
    detail: str = ""
    """What happened, in words, where `cause` or `stop_reason` alone would not say it."""
    stop_reason: StopReason | None = None
    environment: list[str] = []
    """The layers with their digests, `name@digest`, from the bottom."""
    parent: str = ""
    """Of a fork: the sandbox that it was forked from."""
    hostname: str = ""
    labels: dict[str, str] = {}
    args: ContainerRunArgs | None = None
    create_ms: float | None = None
    """Time the server took to make it ready."""
    idle_seconds: float | None = None
    running_processes: int = 0
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    cpu_seconds: float | None = None
    disk_bytes: int | None = None
    story: list[StoryLine] = []


class ErrorBody(msgspec.Struct, kw_only=True):
    """An error inside a batch result; the same fields as an error response's."""

    code: str
    message: str
    ran: str
    field: str | None = None
    cause: str | None = None


class BatchResult(msgspec.Struct, kw_only=True):
    """Answer to POST /v1/sandboxes: those made and, one each, why the others were not."""

    sandboxes: list[SandboxInfo]
    errors: list[ErrorBody] = []
    stopped_ms: float | None = None
    """Of a fork: how long the parent's processes stood. None where the answer is an earlier one's."""


class ForkRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sandboxes/{id}/fork. `count` sandboxes with the files that it has now; what is not given is as the parent's `args` say.

    Processes, sockets, sessions and records are not inherited. `env` and `labels` are added to the parent's; -1 removes a time limit.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=32768)] = 1
    memory_limit_mb: int | None = None
    cpu_cores_limit: float | None = None
    pids_limit: int | None = None
    disk_limit_mb: int | None = None
    """What a fork may write itself; what its parent wrote stays charged to that."""
    ttl_running_stop: float | None = None
    ttl_max: float | None = None
    ttl_paused_stop: float | None = None
    network: Literal["none", "nat"] | None = None
    init_user: str | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    hostname: str | None = None
    """Of all of them. Not given: each has its own."""
    labels: dict[str, str] = {}


class PackRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sandboxes/{id}/pack-diff: what the sandbox has written becomes a layer, `name:tag`."""

    name: str
    tag: str = "latest"
    kind: Literal["snapshot", "workspace", "toolkit"] = "snapshot"
    """A snapshot stands on the layers that the sandbox stands on, and a sandbox made from it has all its files. The others are the
    difference alone, to be laid over any base."""
    scrub: list[str] = []
    """Globs of what is left out, besides the default ones: `/build/**`, `*.pyc`. A glob without a slash means the name in any folder."""
    default_scrub: bool = True
    op_id: str | None = None
    """Repeating an id gives the record of the first, and packs nothing."""


class PackInfo(msgspec.Struct, kw_only=True):
    """A pack of a sandbox's disk, under way or over."""

    op_id: str
    sandbox_id: str
    name: str
    tag: str
    kind: LayerKind
    state: Literal["packing", "published", "failed"]
    created_at: float
    ended_at: float | None = None
    digest: str = ""
    """Of the layer."""
    below: list[str] = []
    """Digests of the layers that it stands on, from the bottom."""
    stopped_ms: float = 0.0
    """How long the sandbox's processes stood. The rest happened while they ran."""
    total_ms: float | None = None
    files: int = 0
    metadata_bytes: int = 0
    logical_bytes: int = 0
    """Of all files in the layer, holes included."""
    data_bytes: int = 0
    """Of files' contents, each once."""
    new_bytes: int = 0
    """Of these, what the store did not have yet."""
    left_out: int = 0
    """Entries that were residue; a folder counts as one."""
    merged: int = 0
    """Earlier snapshot layers that are part of this one now."""
    error: ErrorBody | None = None


class UpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """PATCH /v1/sandboxes/{id}: only what is given changes; -1 removes a time limit."""

    ttl_running_stop: float | None = None
    ttl_max: float | None = None
    ttl_paused_stop: float | None = None
    labels: dict[str, str] | None = None


class ExecRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A command. Exactly one of `argv` and `shell` is given.

    Environment precedence, the same for exec, start and sessions, later wins: built-in PATH/HOME/USER/LOGNAME/SHELL (TERM with a tty), the
    environment's layers from the bottom, the sandbox's `env`, the request's `env`.
    """

    argv: list[str] | None = None
    shell: str | None = None
    """Text for `bash -c`, or `sh -c` where the image has no bash."""
    cwd: str | None = None
    user: str | None = None
    env: dict[str, str] = {}
    stdin: bytes | None = None
    """Given: these bytes, then EOF. None: /dev/null (or, with `open_stdin`, what the stream sends)."""
    open_stdin: bool = False
    tty: bool = False
    rows: int = 24
    cols: int = 80
    timeout: float | None = None
    """Seconds; kept beside the process. At the deadline TERM, then KILL to the whole tree after `kill_grace` seconds."""
    kill_grace: float = 2.0
    output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES
    """Kept of each of stdout and stderr: the first and the last half of it."""
    rlimits: dict[str, list[int]] = {}
    """Name without RLIMIT_, lower case, to [soft, hard]; e.g. {"nofile": [1024, 4096]}."""
    background: bool = False
    """Outlives the request and the idle clock does not count it as activity (a service)."""
    op_id: str | None = None
    """Repeating an id returns the record of the first, and runs nothing."""


class ExecResult(msgspec.Struct, kw_only=True):
    """The outcome of a command. `exit_code` is None where a signal ended it or the outcome is not known."""

    op_id: str
    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False
    """The sandbox's memory limit killed a process while this command ran, also where it exited with 0, as `big | cat` does. The limit is
    the whole sandbox's, so the process may be another command's."""
    stdout: bytes = b""
    """Head and tail joined; where `stdout_dropped` > 0 that many bytes are missing after the first half."""
    stderr: bytes = b""
    stdout_bytes: int = 0
    """Written by the command in all; kept is len(stdout)."""
    stderr_bytes: int = 0
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    peak_memory_bytes: int = 0
    """Largest resident set among the leader and the children it waited for."""
    started_at: float = 0.0
    replayed: bool = False
    """The answer came from the record; nothing was run."""

    @property
    def ok(self) -> bool:
        """It ran to its end and exited with 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def stdout_text(self) -> str:
        """stdout as UTF-8, with what is none replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def stderr_text(self) -> str:
        """stderr as UTF-8, with what is none replaced."""
        return self.stderr.decode(errors="replace")

    def check(self) -> ExecResult:
        """This result if it is ok; otherwise CommandFailed, with the end of its stderr, or of its stdout, in the message."""
        if self.ok:
            return self
        if self.timed_out:
            cause, how = "timeout", "timed out"
        elif self.signal is not None:
            cause, how = "signal", f"was ended by signal {self.signal}"
        else:
            cause, how = "exit", f"exited with {self.exit_code}"
        if self.oom:
            cause, how = "oom", how + ", out of memory"
        tail = (self.stderr or self.stdout)[-2000:].decode(errors="replace").strip()
        raise CommandFailed(
            f"{self.op_id} {how}" + (f": {tail}" if tail else ""),
            cause=cause,
            details={"op_id": self.op_id, "exit_code": self.exit_code, "signal": self.signal},
        )


class ProcessInfo(msgspec.Struct, kw_only=True):
    """A process started by start(), exec() or in a session."""

    op_id: str
    sandbox_id: str
    state: Literal["running", "exited", "lost"]
    argv: list[str] | None = None
    shell: str | None = None
    session_id: str | None = None
    pid: int | None = None
    """In the sandbox's pid namespace, where known."""
    background: bool = False
    started_at: float = 0.0
    result: ExecResult | None = None
    """Set when it ended; without the output, which GET .../output gives."""


class StreamOutput(msgspec.Struct, kw_only=True):
    """A piece of kept output. `offset` is absolute in the stream; `gap` bytes before it were dropped."""

    data: bytes
    offset: int
    next_offset: int
    gap: int = 0
    eof: bool = False


class SignalRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`signal` by number or name ("TERM", "SIGKILL"); to the leader, or to the whole `tree` of the command."""

    signal: int | str
    tree: bool = False


class SessionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A shell that keeps its working directory and environment between commands."""

    user: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    session_id: str | None = None
    """Unique within the sandbox; where none is given the server makes one. Repeating it gives the session that was opened."""


class SessionInfo(msgspec.Struct, kw_only=True):
    """An open session."""

    session_id: str
    sandbox_id: str
    state: Literal["open", "closed"] = "open"
    created_at: float = 0.0


class SessionRunRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A command for a session's shell."""

    shell: str
    timeout: float | None = None
    kill_grace: float = 2.0
    output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES
    op_id: str | None = None


class FileStat(msgspec.Struct, kw_only=True):
    """What lstat says (stat where `follow` was asked), with the names as the sandbox's own /etc/passwd has them."""

    path: str
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
    size: int
    mode: int
    """Permission bits, 0o7777."""
    uid: int
    gid: int
    mtime: float
    inode: int = 0
    nlink: int = 1
    target: str | None = None
    """Of a symlink."""
    raw_path: bytes | None = None
    """Where `path` or `target` is not UTF-8: the bytes of the path; `path` then shows replacement characters."""
    raw_target: bytes | None = None


class LayerInfo(msgspec.Struct, kw_only=True):
    """One layer on the node."""

    name: str
    digest: str
    kind: LayerKind
    metadata_bytes: int
    data_bytes: int
    created_at: float = 0.0
    source: str = ""


class EnvironmentInfo(msgspec.Struct, kw_only=True):
    """A named layer and what it says of the environment it brings."""

    name: str
    digest: str
    kind: LayerKind
    metadata_bytes: int = 0
    data_bytes: int = 0
    """Contents that it refers to, each once."""
    stored_bytes: int = 0
    """Of `data_bytes`, what it brought into the store; the rest was there."""
    logical_bytes: int = 0
    """Sizes of its files, holes and repetitions included."""
    files: int = 0
    packs: int = 0
    """Files of the store that its contents lie in."""
    below: list[str] = []
    """Digests of the layers that it is a difference to, from the bottom."""
    created_at: float = 0.0
    source: str = ""
    provenance: dict[str, str] = {}
    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] = []
    command: list[str] = []
    """What its image runs by default, after the entrypoint. Nothing is run of itself: a sandbox waits for its commands."""
    mounted: int = 0
    """How many live sandboxes use it."""


class NodeInfo(msgspec.Struct, kw_only=True):
    """GET /v1/node."""

    edge: str
    version: str
    state: Literal["serving", "draining"] = "serving"
    backends: list[str] = []
    sandboxes: int = 0
    cpu_count: int = 0
    memory_total_mb: int = 0
    kernel: str = ""
    capabilities: dict[str, bool] = {}
    pid: int = 0
    started_at: float = 0.0
