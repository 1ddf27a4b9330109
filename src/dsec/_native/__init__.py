"""Where the native binary (launcher, aether, chronus, the sandbox's init) is: built into this package by the package build."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["NativeBinaryMissing", "native_binary"]


class NativeBinaryMissing(RuntimeError):
    """There is no native binary that can run here; the message says how to get one."""


def native_binary() -> Path:
    """Path of the static binary. `DSEC_NATIVE` overrides it (another build, e.g. with sanitizers). Raises `NativeBinaryMissing`."""
    override = os.environ.get("DSEC_NATIVE")
    path = Path(override) if override else Path(__file__).with_name("dsec-native")
    if not path.is_file():
        remedy = (
            "correct or unset DSEC_NATIVE" if override else "run `make -C native` in a checkout, else install again where a C compiler is"
        )
        raise NativeBinaryMissing(f"the native binary {path} is not there: {remedy}")
    if not os.access(path, os.X_OK):
        raise NativeBinaryMissing(f"the native binary {path} cannot be executed: chmod +x it, and see that its mount is not noexec")
    return path
