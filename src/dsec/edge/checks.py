"""Bad input is refused at the door: every check names the field and what is allowed. Nothing has run when one raises."""

from __future__ import annotations

import re
import signal as signals

import msgspec

from dsec.environments.names import check_name, check_tag
from dsec.environments.residue import check_rules
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.schema import (
    MAX_OUTPUT_LIMIT_BYTES,
    ContainerRunArgs,
    CreateRequest,
    ExecRequest,
    PackRequest,
    SessionRequest,
    SessionRunRequest,
    UpdateRequest,
)

__all__ = [
    "check_create",
    "check_exec",
    "check_pack",
    "check_path",
    "check_session",
    "check_session_run",
    "check_update",
    "fitted",
    "signal_number",
]

MAX_ARG_BYTES = 128 << 10
"""MAX_ARG_STRLEN of Linux, the closing NUL counted."""
MAX_COMMAND_BYTES = (1 << 20) - (32 << 10)
"""argv and env go in one frame of the channel, which is below what Linux takes (2 MiB)."""
MAX_STDIN_BYTES = 64 << 20
MAX_SECONDS = 10 * 365 * 86400.0
MAX_LABELS = 64
_OP_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOSTNAME = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?(?::[A-Za-z0-9_][A-Za-z0-9_.-]*\$?)?")
_RLIMITS = frozenset(
    {"as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss"}
    | {"rtprio", "rttime", "sigpending", "stack"}
)
_SIGNALS = {name.removeprefix("SIG"): number.value for name, number in signals.Signals.__members__.items()}


def _text(value: str, field: str) -> None:
    if "\0" in value:
        raise InvalidArgument(f"{field} holds a NUL character", field=field)


def check_env(env: dict[str, str], field: str = "env") -> int:
    """Names without `=` and NUL, not empty; values without NUL. Returns the size in bytes."""
    size = 0
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidArgument(f"{field} name {name!r} must not be empty nor hold '=' or NUL", field=field)
        if "\0" in value:
            raise InvalidArgument(f"{field} value of {name} holds a NUL character", field=field)
        length = len(name) + 1 + (len(value) if value.isascii() else len(value.encode("utf-8", "surrogateescape")))
        if length >= MAX_ARG_BYTES:
            raise InvalidArgument(f"{field} value of {name} is {length} bytes long, at most {MAX_ARG_BYTES - 1} are allowed", field=field)
        size += length + 1
    return size


def check_path(path: str, field: str = "path") -> None:
    """Absolute, no NUL, not longer than Linux takes."""
    _text(path, field)
    if not path.startswith("/"):
        raise InvalidArgument(f"{field} {path!r} must be absolute", field=field)
    if len(path) > 4095:
        raise InvalidArgument(f"{field} is longer than 4,095 characters", field=field)


def check_user(user: str, field: str = "user") -> None:
    """`name`, `uid`, `name:group` or `uid:gid`. Whether it exists is seen inside."""
    if len(user) > 128 or not _USER.fullmatch(user):
        raise InvalidArgument(f"{field} {user!r:.100} must be name, uid, name:group or uid:gid", field=field)
    for part in user.split(":"):
        if part.isdigit() and int(part) > 65534:
            raise InvalidArgument(f"{field} {user!r}: ids go up to 65534", field=field)


def check_seconds(value: float | None, field: str, *, zero: bool = False) -> None:
    """None, or a finite number of seconds above zero (or zero, where `zero`)."""
    if value is None:
        return
    if not (0 <= value <= MAX_SECONDS) or (value == 0 and not zero):
        raise InvalidArgument(f"{field} is {value}, allowed is {'0' if zero else 'above 0'} to {MAX_SECONDS:.0f} seconds", field=field)


def check_labels(labels: dict[str, str], field: str = "labels") -> None:
    """At most 64, keys of 1-128 characters, values up to 1,024, no NUL."""
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(f"{len(labels)} labels, at most {MAX_LABELS} are allowed", field=field)
    for key, value in labels.items():
        if not 1 <= len(key) <= 128 or "\0" in key or "=" in key:
            raise InvalidArgument(f"label key {key!r:.100} must have 1 to 128 characters and no '=' or NUL", field=field)
        if len(value) > 1024 or "\0" in value:
            raise InvalidArgument(f"the value of label {key!r} must have at most 1,024 characters and no NUL", field=field)


def fitted(args: ContainerRunArgs, host_memory_mb: int, host_cpus: int) -> ContainerRunArgs:
    """A default that is more than the host has is lowered to what it has; a caller's own wish is `check_create`'s to refuse."""
    usual = ContainerRunArgs()
    lowered: dict[str, float] = {}
    if host_memory_mb < args.memory_limit_mb == usual.memory_limit_mb:
        lowered["memory_limit_mb"] = host_memory_mb
    if host_cpus < args.cpu_cores_limit == usual.cpu_cores_limit:
        lowered["cpu_cores_limit"] = float(host_cpus)
    return msgspec.structs.replace(args, **lowered) if lowered else args


def check_create(request: CreateRequest, host_memory_mb: int, host_cpus: int) -> None:
    """All of a create that can be judged without the environments. Its args are `fitted`."""
    args = request.args
    if not 1 <= request.count <= 32768:
        raise InvalidArgument(f"count is {request.count}, allowed is 1 to 32768", field="count")
    _check_layers(args)
    _limit(args.memory_limit_mb, "memory_limit_mb", host_memory_mb, "MB of memory that this host has")
    _limit(args.pids_limit, "pids_limit", 1 << 22, "processes")
    _limit(args.disk_limit_mb, "disk_limit_mb", 1 << 30, "MB")
    if not 0.01 <= args.cpu_cores_limit <= host_cpus:
        raise InvalidArgument(
            f"cpu_cores_limit is {args.cpu_cores_limit}, allowed is 0.01 to {host_cpus} CPUs that this host has", field="cpu_cores_limit"
        )
    check_seconds(args.ttl_running_stop, "ttl_running_stop")
    check_seconds(args.ttl_max, "ttl_max")
    check_seconds(args.ttl_paused_stop, "ttl_paused_stop")
    for name, allowed in args.network_rules.items():
        if allowed:
            raise Unsupported(f"network_rules[{name!r}]: the allowlist does not exist yet, only False is accepted", field="network_rules")
    if args.init_user:
        check_user(args.init_user, "init_user")
    if check_env(args.env) > MAX_COMMAND_BYTES // 2:
        raise InvalidArgument(f"env is larger than {MAX_COMMAND_BYTES // 2} bytes", field="env")
    if args.workdir:
        check_path(args.workdir, "workdir")
    if args.hostname and not _HOSTNAME.fullmatch(args.hostname):
        raise InvalidArgument(
            f"hostname {args.hostname!r:.100} must be 1 to 63 letters, digits, '-' and '.', each part between letters or digits",
            field="hostname",
        )
    check_labels(args.labels)


def _check_layers(args: ContainerRunArgs) -> None:
    if not args.container_image and not args.environment:
        raise InvalidArgument("give container_image or environment", field="container_image")
    if args.container_image and args.environment and args.environment[0] != args.container_image:
        raise InvalidArgument("container_image and environment exclude each other, unless it is its first element", field="environment")
    for field, refs in (("container_image", [args.container_image]), ("environment", args.environment)):
        for ref in refs:
            _text(ref, field)


def _limit(value: int, field: str, most: int, what: str) -> None:
    if not 1 <= value <= most:
        raise InvalidArgument(f"{field} is {value}, allowed is 1 to {most} {what}", field=field)


def check_update(request: UpdateRequest) -> None:
    """Limits as at create, or -1."""
    for field in ("ttl_running_stop", "ttl_max", "ttl_paused_stop"):
        value = getattr(request, field)
        if value != -1:
            check_seconds(value, field)
    if request.labels is not None:
        check_labels(request.labels)


def check_pack(request: PackRequest) -> None:
    """A layer's name, tag and rules, and the id."""
    check_name(request.name)
    check_tag(request.tag)
    check_rules(request.scrub)
    if request.op_id is not None:
        check_op_id(request.op_id)


def check_op_id(op_id: str, field: str = "op_id") -> None:
    """[A-Za-z0-9._-]{1,128}: it is a name of a cgroup too."""
    if not _OP_ID.fullmatch(op_id) or op_id in (".", ".."):
        raise InvalidArgument(f"{field} must match [A-Za-z0-9._-]{{1,128}}", field=field)


def _check_limits(timeout: float | None, kill_grace: float, output_limit_bytes: int) -> None:
    check_seconds(timeout, "timeout")
    check_seconds(kill_grace, "kill_grace", zero=True)
    if not 0 <= output_limit_bytes <= MAX_OUTPUT_LIMIT_BYTES:
        raise InvalidArgument(
            f"output_limit_bytes is {output_limit_bytes}, allowed is 0 to {MAX_OUTPUT_LIMIT_BYTES}", field="output_limit_bytes"
        )


def _argument_bytes(text: str, field: str) -> int:
    if "\0" in text:
        raise InvalidArgument(f"{field} holds a NUL character", field=field)
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))
    if size >= MAX_ARG_BYTES:
        raise InvalidArgument(f"an argument in {field} is {size} bytes long, at most {MAX_ARG_BYTES - 1} are allowed", field=field)
    return size + 1


def check_exec(request: ExecRequest) -> None:
    """All of a command that can be judged outside the sandbox. Hot: a plain command passes in about two microseconds."""
    argv = request.argv
    if (argv is None) == (request.shell is None):
        raise InvalidArgument("give exactly one of argv and shell", field="argv")
    if argv is not None:
        if not argv or not argv[0]:
            raise InvalidArgument("argv must begin with a command", field="argv")
        size = 0
        for argument in argv:
            size += _argument_bytes(argument, "argv")
        field = "argv"
    else:
        assert request.shell is not None
        size = _argument_bytes(request.shell, "shell")
        field = "shell"
    if request.env:
        size += check_env(request.env)
    if size > MAX_COMMAND_BYTES:
        raise InvalidArgument(f"the command and its env are {size} bytes, at most {MAX_COMMAND_BYTES} are allowed", field=field)
    if request.cwd is not None:
        check_path(request.cwd, "cwd")
    if request.user is not None:
        check_user(request.user)
    if request.op_id is not None:
        check_op_id(request.op_id)
    if request.stdin is not None:
        if request.open_stdin:
            raise InvalidArgument("stdin and open_stdin exclude each other", field="stdin")
        if len(request.stdin) > MAX_STDIN_BYTES:
            raise InvalidArgument(f"stdin is {len(request.stdin)} bytes, at most {MAX_STDIN_BYTES}; stream the rest", field="stdin")
    if request.tty and not (1 <= request.rows <= 65535 and 1 <= request.cols <= 65535):
        raise InvalidArgument("rows and cols go from 1 to 65535", field="rows")
    _check_limits(request.timeout, request.kill_grace, request.output_limit_bytes)
    for name, pair in request.rlimits.items():
        if name not in _RLIMITS:
            raise InvalidArgument(f"rlimits name {name!r:.50} is none of {', '.join(sorted(_RLIMITS))}", field="rlimits")
        if len(pair) != 2 or not (-1 <= pair[0] < 1 << 63 and -1 <= pair[1] < 1 << 63) or (pair[0] > pair[1] >= 0):
            raise InvalidArgument(f"rlimits[{name!r}] must be [soft, hard] with soft <= hard, -1 for no limit", field="rlimits")


def check_session(request: SessionRequest) -> None:
    """A session's name, user, folder and environment."""
    if request.session_id is not None:
        check_op_id(request.session_id, "session_id")
    if check_env(request.env) > MAX_COMMAND_BYTES:
        raise InvalidArgument(f"env is larger than {MAX_COMMAND_BYTES} bytes", field="env")
    if request.cwd is not None:
        check_path(request.cwd, "cwd")
    if request.user is not None:
        check_user(request.user)


def check_session_run(request: SessionRunRequest) -> None:
    """A session's command. It is read by a running shell, so the kernel's limit on one argument does not bind."""
    _text(request.shell, "shell")
    if len(request.shell.encode("utf-8", "surrogateescape")) > MAX_COMMAND_BYTES:
        raise InvalidArgument(f"shell is larger than {MAX_COMMAND_BYTES} bytes", field="shell")
    if request.op_id is not None:
        check_op_id(request.op_id)
    _check_limits(request.timeout, request.kill_grace, request.output_limit_bytes)


def signal_number(signal: int | str) -> int:
    """1-64, or a name with or without SIG in any case."""
    if isinstance(signal, int):
        if 1 <= signal <= 64:
            return signal
    elif (number := _SIGNALS.get(signal.upper().removeprefix("SIG"))) is not None:
        return number
    raise InvalidArgument(f"signal {signal!r:.50} is neither 1 to 64 nor a name such as TERM", field="signal")
