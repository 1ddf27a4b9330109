"""The record of what sandboxes were asked and what came of it: one ordered log a sandbox, in SQLite."""

from dsec.trajectory.journal import Journal
from dsec.trajectory.rows import OpRow, PackRow, SandboxRow, SessionRow

__all__ = ["Journal", "OpRow", "PackRow", "SandboxRow", "SessionRow"]
