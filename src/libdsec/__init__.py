"""libdsec: the SDK of DSec. Async here; `libdsec.sync` is the blocking twin."""

from libdsec.client import DSecClient
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
from libdsec.sandbox import Sandbox
from libdsec.schema import ContainerRunArgs as DSecContainerRunArgs
from libdsec.schema import ExecResult, ProcessInfo, SandboxInfo
from libdsec.timeouts import Timeouts

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
