"""What a fork is to be, from its parent and the request. Pure."""

from __future__ import annotations

import msgspec

from dsec.backends.protocol import SandboxSpec
from libdsec.schema import ContainerRunArgs, ForkRequest

__all__ = ["fork_plan"]

_REPLACED = (
    "memory_limit_mb",
    "cpu_cores_limit",
    "pids_limit",
    "disk_limit_mb",
    "network",
    "init_user",
    "workdir",
)
_TIME_LIMITS = ("ttl_running_stop", "ttl_max", "ttl_paused_stop")


def fork_plan(parent: SandboxSpec, request: ForkRequest) -> SandboxSpec:
    """The spec that all the forks share. Its hostname is empty where each is to have its own."""
    args = _fork_args(parent.args, request)
    return msgspec.structs.replace(
        parent,
        sandbox_id="",
        generation=1,
        args=args,
        range_index=-1,
        env={**parent.env, **request.env},
        workdir=request.workdir or parent.workdir,
        user=request.init_user or parent.user,
        hostname=request.hostname or "",
        parent=parent.sandbox_id,
        renewed=True,
    )


def _fork_args(parent: ContainerRunArgs, request: ForkRequest) -> ContainerRunArgs:
    changes = {name: value for name in _REPLACED if (value := getattr(request, name)) is not None}
    for name in _TIME_LIMITS:
        if (seconds := getattr(request, name)) is not None:
            changes[name] = None if seconds == -1 else seconds
    changes["env"] = {**parent.env, **request.env}
    changes["labels"] = {**parent.labels, **request.labels}
    changes["hostname"] = request.hostname or ""
    return msgspec.structs.replace(parent, **changes)
