"""Between the journal's bytes and the types: specs, statuses, requests, results."""

from __future__ import annotations

import hashlib

import msgspec

from dsec.backends.protocol import SandboxSpec
from dsec.edge.machine import Status
from dsec.trajectory import OpRow, SandboxRow
from libdsec.errors import DSecError
from libdsec.schema import ErrorBody, ExecRequest, ExecResult, ProcessInfo, SandboxInfo, SessionRequest, SessionRunRequest

__all__ = [
    "decode_errors",
    "decode_ids",
    "decode_result",
    "decode_sandbox",
    "encode",
    "encode_request",
    "error_body",
    "info_from_row",
    "process_info",
    "sandbox_info",
]

STDIN_KEPT_BYTES = 64 << 10

encode = msgspec.msgpack.Encoder().encode
_decode_status = msgspec.msgpack.Decoder(Status).decode
_decode_spec = msgspec.msgpack.Decoder(SandboxSpec).decode
_decode_result = msgspec.msgpack.Decoder(ExecResult).decode
decode_ids = msgspec.msgpack.Decoder(list[str]).decode
decode_errors = msgspec.msgpack.Decoder(list[ErrorBody]).decode


def decode_sandbox(row: SandboxRow) -> tuple[SandboxSpec, Status]:
    """From the journal."""
    return _decode_spec(row.spec), _decode_status(row.status)


def encode_request(request: ExecRequest | SessionRunRequest | SessionRequest) -> bytes:
    """For the journal, and to tell a repeated request from another one with its id. Large standard input is kept as its digest."""
    if isinstance(request, ExecRequest) and request.stdin is not None and len(request.stdin) > STDIN_KEPT_BYTES:
        digest = hashlib.blake2b(request.stdin, digest_size=32).hexdigest()
        request = msgspec.structs.replace(request, stdin=f"{len(request.stdin)} bytes, blake2b {digest}".encode())
    return encode(request)


def error_body(error: DSecError) -> ErrorBody:
    """As it is told inside a result."""
    return ErrorBody(code=error.code, message=error.message, ran=error.ran, field=error.field, cause=error.cause)


def sandbox_info(spec: SandboxSpec, status: Status) -> SandboxInfo:
    """As the API shows it, without what it uses now."""
    return SandboxInfo(
        sandbox_id=spec.sandbox_id,
        backend=spec.backend,
        state=status.state,
        generation=status.generation,
        created_at=status.created_at,
        started_at=status.started_at,
        ended_at=status.ended_at,
        cause=status.cause,
        detail=status.detail,
        stop_reason=status.stop_reason,
        environment=spec.layers,
        parent=spec.parent,
        hostname=spec.hostname,
        labels=status.labels,
        args=spec.args,
        create_ms=status.create_ms,
        story=list(status.story),
    )


def info_from_row(row: SandboxRow) -> SandboxInfo:
    """Of one that is over."""
    return sandbox_info(*decode_sandbox(row))


def process_info(row: OpRow, pid: int | None = None) -> ProcessInfo:
    """An operation as the API shows it, its result without output. One whose request was lost has neither argv nor shell."""
    request = msgspec.msgpack.decode(row.request) if row.request else {}
    return ProcessInfo(
        op_id=row.op_id,
        sandbox_id=row.sandbox_id,
        state=row.state,  # type: ignore[arg-type]
        argv=request.get("argv"),
        shell=request.get("shell"),
        session_id=row.session_id,
        pid=pid,
        background=bool(row.background),
        started_at=row.started_at,
        result=None if row.result is None else _decode_result(row.result),
    )


def decode_result(row: OpRow, output: tuple[bytes, bytes] | None) -> ExecResult:
    """A recorded result, marked as such. `output` is None where the journal had to drop it: then all of it counts as dropped."""
    assert row.result is not None, "only what has exited has a result"
    result = _decode_result(row.result)
    if output is not None:
        result.stdout, result.stderr = output
    else:
        result.stdout_dropped, result.stderr_dropped = result.stdout_bytes, result.stderr_bytes
    result.replayed = True
    return result
