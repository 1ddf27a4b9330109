"""Creations and commands, counted by outcome: what their routes and the shortcut to them do alike."""

from __future__ import annotations

from collections.abc import Awaitable

from dsec.apiserver.contract import EdgeApi
from dsec.apiserver.metrics import Metrics
from libdsec.errors import DSecError
from libdsec.schema import BatchResult, ExecRequest, ExecResult

__all__ = ["counted_batch", "counted_exec"]


async def counted_batch(metrics: Metrics, making: Awaitable[BatchResult], count: int) -> BatchResult:
    """What `making` gives of `count` sandboxes."""
    creates = metrics.creates
    try:
        batch = await making
    except DSecError as error:
        creates.labels(error.code).inc(count)
        raise
    creates.labels("made").inc(len(batch.sandboxes))
    for failure in batch.errors:
        creates.labels(failure.code).inc()
    return batch


async def counted_exec(metrics: Metrics, edge: EdgeApi, sandbox_id: str, request: ExecRequest) -> ExecResult:
    """The command's result."""
    try:
        result = await edge.exec(sandbox_id, request)
    except DSecError as error:
        metrics.execs.labels(error.code).inc()
        raise
    metrics.execs.labels("answered").inc()
    return result
