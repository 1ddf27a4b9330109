"""libdsec: the SDK of DSec. Async here; `libdsec.sync` is the blocking twin.

What talks HTTP is imported when it is first asked for: that takes longer than all else, and who only wants the errors, as the processes of
a node do, begins sooner without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from libdsec.errors import (
    CommandFailed,
    Conflict,
    ConnectionFailed,
    Denied,
    DSecError,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    QuotaExceeded,
    SandboxFailed,
    Unsupported,
)
from libdsec.schema import ContainerRunArgs as DSecContainerRunArgs
from libdsec.schema import ExecResult, ProcessInfo, SandboxInfo
from libdsec.timeouts import Timeouts

if TYPE_CHECKING:
    from libdsec.client import DSecClient
    from libdsec.sandbox import Sandbox

__all__ = [
    "CommandFailed",
    "Conflict",
    "ConnectionFailed",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "Denied",
    "ExecResult",
    "InvalidArgument",
    "NotFound",
    "OutcomeUnknown",
    "Overloaded",
    "ProcessInfo",
    "QuotaExceeded",
    "Sandbox",
    "SandboxFailed",
    "SandboxInfo",
    "Timeouts",
    "Unsupported",
]

_LATER = {"DSecClient": "libdsec.client", "Sandbox": "libdsec.sandbox"}


def __getattr__(name: str) -> Any:
    if (module := _LATER.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value
