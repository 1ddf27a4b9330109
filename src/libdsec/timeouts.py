"""How long the SDK waits, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timeouts"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. A command's own `timeout` is kept beside the process, on the server; `exec_grace` is what the SDK waits beyond it."""

    connect: float = 5.0
    """For one connection attempt."""
    request: float = 60.0
    """For requests that ask or change something small."""
    create: float = 120.0
    """For run, run_many and their sisters, unless they are given one."""
    exec_grace: float = 30.0
    """Beyond a command's timeout and kill grace, until the SDK gives up waiting for its result."""
    reconnect: float = 30.0
    """How long a lost server is looked for before a call fails."""
    overloaded: float = 5.0
    """How long a call is repeated that the node refused as Overloaded."""
