"""Requests of the schema as payloads of the channel, and its answers as results. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dsec.backends.container import wire
from dsec.backends.container.frames import Fields, FieldValue, Frame, encode_fields
from dsec.backends.protocol import LiveSession
from libdsec.errors import InvalidArgument
from libdsec.schema import ExecRequest, ExecResult, SessionRequest, SessionRunRequest

__all__ = ["INLINE_STDIN", "Output", "exec_payload", "live_session", "run_payload", "shell_payload", "started_session"]

INLINE_STDIN: Final = 256 << 10
"""Stdin up to this goes with the request; more is streamed under credit, so that no frame exceeds its limit."""

EXEC_CREDIT: Final = 1 << 40
NANOSECONDS: Final = 1_000_000_000


def _refuse_nul(field: str, values: Iterable[str]) -> None:
    for value in values:
        if "\0" in value:
            raise InvalidArgument(f"{field} holds a NUL byte, which no command can be given", field=field)


def _nanoseconds(field: str, seconds: float) -> int:
    if not 0 <= seconds < 1 << 30:
        raise InvalidArgument(f"{field} must be between 0 and {1 << 30} seconds, not {seconds}", field=field)
    return int(seconds * NANOSECONDS)


def _bounded(field: str, payload: bytes) -> bytes:
    if len(payload) > wire.MAX_PAYLOAD:
        raise InvalidArgument(f"arguments and environment take {len(payload)} bytes; at most {wire.MAX_PAYLOAD} are allowed", field=field)
    return payload


def exec_payload(op_id: str, request: ExecRequest, *, live: bool, credit: int) -> bytes:
    """The EXEC frame's payload. Raises InvalidArgument naming the field."""
    fields: list[tuple[int, FieldValue]] = [(wire.T_SESSION_ID, op_id)]
    if request.shell is not None:
        if request.argv is not None:
            raise InvalidArgument("give argv or shell, not both", field="argv")
        _refuse_nul("shell", (request.shell,))
        fields.append((wire.T_SHELL_TEXT, request.shell))
        where = "shell"
    else:
        if not request.argv or not request.argv[0]:
            raise InvalidArgument("argv must have at least one element, and its first must not be empty", field="argv")
        _refuse_nul("argv", request.argv)
        fields += [(wire.T_ARG, arg) for arg in request.argv]
        where = "argv"
    if request.cwd is None:
        fields.append((wire.T_CWD_FALLBACK, 1))
    else:
        _refuse_nul("cwd", (request.cwd,))
        fields.append((wire.T_CWD, request.cwd))
    if request.user is not None:
        _refuse_nul("user", (request.user,))
        fields.append((wire.T_USER, request.user))
    fields += _environment(request.env)
    if request.tty:
        fields += [(wire.T_TTY, 1), (wire.T_ROWS, request.rows), (wire.T_COLS, request.cols)]
    if request.stdin is not None and len(request.stdin) <= INLINE_STDIN:
        fields.append((wire.T_STDIN_DATA, request.stdin))
    elif request.stdin is not None or request.open_stdin:
        fields.append((wire.T_STDIN_OPEN, 1))
    fields += _limits(request.timeout, request.kill_grace, request.output_limit_bytes)
    for name, pair in request.rlimits.items():
        if len(pair) != 2 or not name.isalnum():
            raise InvalidArgument(f"rlimits[{name!r}] must be [soft, hard] under a name like nofile", field="rlimits")
        fields.append((wire.T_RLIMIT, f"{name} {pair[0]} {pair[1]}"))
    if request.background:
        fields.append((wire.T_BACKGROUND, 1))
    fields += [(wire.T_LIVE, int(live)), (wire.T_CREDIT_BYTES, credit)]
    return _bounded(where, encode_fields(fields))


def _environment(env: dict[str, str]) -> list[tuple[int, FieldValue]]:
    fields: list[tuple[int, FieldValue]] = []
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidArgument(
                f"env name {name!r}: names must not be empty or hold '=', and neither side may hold a NUL byte", field="env"
            )
        fields.append((wire.T_ENV, f"{name}={value}"))
    return fields


def _limits(timeout: float | None, grace: float, output_limit: int) -> list[tuple[int, FieldValue]]:
    fields: list[tuple[int, FieldValue]] = [(wire.T_OUTPUT_LIMIT, output_limit)]
    if timeout is not None:
        # 0 on the wire means no time limit; a limit of nothing is the shortest one.
        fields.append((wire.T_TIMEOUT_NS, max(1, _nanoseconds("timeout", timeout))))
    fields.append((wire.T_GRACE_NS, _nanoseconds("kill_grace", grace)))
    return fields


def shell_payload(session_id: str, request: SessionRequest) -> bytes:
    """The SHELL frame's payload."""
    fields: list[tuple[int, FieldValue]] = [(wire.T_SESSION_ID, session_id)]
    if request.user is not None:
        _refuse_nul("user", (request.user,))
        fields.append((wire.T_USER, request.user))
    if request.cwd is None:
        fields.append((wire.T_CWD_FALLBACK, 1))
    else:
        _refuse_nul("cwd", (request.cwd,))
        fields.append((wire.T_CWD, request.cwd))
    fields += _environment(request.env)
    return _bounded("env", encode_fields(fields))


def run_payload(session_id: str, op_id: str, request: SessionRunRequest) -> bytes:
    """The RUN frame's payload; output comes when the command has ended."""
    _refuse_nul("shell", (request.shell,))
    fields: list[tuple[int, FieldValue]] = [
        (wire.T_SESSION_ID, session_id),
        (wire.T_OP_ID, op_id),
        (wire.T_SHELL_TEXT, request.shell),
        (wire.T_LIVE, 0),
        (wire.T_CREDIT_BYTES, EXEC_CREDIT),
    ]
    fields += _limits(request.timeout, request.kill_grace, request.output_limit_bytes)
    return _bounded("shell", encode_fields(fields))


def live_session(fields: Fields) -> LiveSession:
    """A SESSION frame."""
    return LiveSession(
        session_id=fields.text(wire.T_SESSION_ID),
        kind="shell" if fields.number(wire.T_SESSION_KIND) == wire.SESSION_SHELL else "command",
        running=bool(fields.number(wire.T_RUNNING)),
        pid=fields.number(wire.T_PID) or None,
        started_at=fields.number(wire.T_STARTED_NS) / NANOSECONDS,
        background=bool(fields.number(wire.T_BACKGROUND)),
    )


def started_session(session_id: str, kind: str, fields: Fields, *, background: bool = False) -> LiveSession:
    """A STARTED frame."""
    return LiveSession(
        session_id=session_id,
        kind=kind,
        running=True,
        pid=fields.number(wire.T_PID) or None,
        started_at=fields.number(wire.T_STARTED_NS) / NANOSECONDS,
        background=background,
    )


class Output:
    """Gathers DATA frames until EXITED. `keep` False counts only, for those who have read the chunks already."""

    __slots__ = ("_chunks", "_dropped", "_keep", "_next")

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._chunks: tuple[list[bytes], list[bytes]] = ([], [])
        self._next = [0, 0]
        self._dropped = [0, 0]

    def skip_to(self, stream: int, offset: int) -> None:
        """The stream is read from `offset` on: what lies before is not missing."""
        self._next[stream - 1] = offset

    def add(self, frame: Frame) -> None:
        """A DATA frame of stdout or stderr."""
        _, stream, data, offset = frame
        index = stream - 1
        if offset > self._next[index]:
            self._dropped[index] += offset - self._next[index]
        self._next[index] = offset + len(data)
        if self._keep:
            self._chunks[index].append(data)

    def result(self, op_id: str, fields: Fields) -> ExecResult:
        """The outcome that an EXITED frame gives, with the output gathered so far."""
        totals = (fields.number(wire.T_STDOUT_TOTAL), fields.number(wire.T_STDERR_TOTAL))
        dropped = [gap + max(0, total - seen) for gap, total, seen in zip(self._dropped, totals, self._next, strict=True)]
        return ExecResult(
            op_id=op_id,
            exit_code=fields.number(wire.T_EXIT_CODE) if wire.T_EXIT_CODE in fields else None,
            signal=fields.number(wire.T_SIGNAL) or None,
            timed_out=bool(fields.number(wire.T_TIMED_OUT)),
            oom=bool(fields.number(wire.T_OOM)),
            stdout=b"".join(self._chunks[0]),
            stderr=b"".join(self._chunks[1]),
            stdout_bytes=totals[0],
            stderr_bytes=totals[1],
            stdout_dropped=dropped[0],
            stderr_dropped=dropped[1],
            wall_ms=fields.number(wire.T_WALL_NS) / 1e6,
            cpu_ms=fields.number(wire.T_CPU_NS) / 1e6,
            peak_memory_bytes=fields.number(wire.T_MAXRSS),
            started_at=fields.number(wire.T_STARTED_NS) / NANOSECONDS,
        )
