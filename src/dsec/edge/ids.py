"""Ids: time-ordered, so that listings and indexes are in the order of birth, with 50 random bits so that nobody guesses one."""

from __future__ import annotations

import os
import time

__all__ = ["new_op_id", "new_sandbox_id", "new_session_id"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [high + low for high in _ALPHABET for low in _ALPHABET]


def _unique() -> str:
    # 50 bits of milliseconds (good for 35,000 years) and 50 random ones: 20 characters of base 32.
    number = (time.time_ns() // 1_000_000 & (1 << 50) - 1) << 50 | int.from_bytes(os.urandom(7)) >> 6
    pairs = _PAIRS
    return "".join([pairs[number >> shift & 1023] for shift in (90, 80, 70, 60, 50, 40, 30, 20, 10, 0)])


def new_sandbox_id(edge: str) -> str:
    """`sb-<edge>-<20 characters>`: any apiserver routes it by the middle part."""
    return f"sb-{edge}-{_unique()}"


def new_op_id() -> str:
    """An operation's id where the client chose none."""
    return "op-" + _unique()


def new_session_id() -> str:
    """A shell session's id."""
    return "ss-" + _unique()
