"""What can be set on an edge."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EdgeSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Bounds and periods; the defaults suit one machine."""

    max_sandboxes: int = 16384
    """Live at once; what the host's processes, descriptors and memory allow is asked besides."""
    launches_at_once: int = 24
    """Launches and removals under way; more only queue in the kernel's locks."""
    adoptions_at_once: int = 32
    running_ops_per_sandbox: int = 1024
    memory_reserve_mb: int = 512
    """Available memory below which nothing new is admitted."""
    sweep_seconds: float = 60.0
    collect_seconds: float = 5.0
    """How long a stop waits for results that are finished but not yet recorded."""
    restart_grace_seconds: float = 30.0
    """No sandbox is found idle sooner than this after a restart: its clients could not reach us."""
    packs_at_once: int = 2
    packs_most: int = 256
    """Under way and waiting for their turn; more are refused, as each keeps a snapshot."""
    pack_memory_bytes: int = 2 << 30
    """What a pack's process may have; some 600 bytes a file."""
    snapshot_layers: int = 8
    """Consecutive snapshot layers on the top of a stack; one more, and they are merged into one."""
    snapshot_small_bytes: int = 1 << 20
    """Metadata up to which they are merged each time."""
    garbage_seconds: float = 3600.0
    """How often garbage in the store is collected, by whichever node comes first; 0: never by itself."""
    garbage_grace_seconds: float = 86400.0
    """How long something in the store must be known to be unused before it is removed."""
    record_hours: float = 24.0
    """How long the records of ended sandboxes are kept."""
    record_limit_bytes: int = 8 << 30
    """Size of the journal above which the records of the sandboxes that ended first are dropped."""
