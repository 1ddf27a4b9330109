"""What ships for testing: `self_check`, the contract of a sandbox as a suite that runs on any backend, and `leaks`."""

from __future__ import annotations

from dsec.testing.suite import CheckOutcome, check_names, self_check

__all__ = ["CheckOutcome", "check_names", "self_check"]
