"""Build hook: compiles native/ with the system's C compiler into dsec/_native/dsec-native of the wheel.

The binary is static, so the wheel's tag names the platform and no Python version. A checkout that is installed editable gets it in place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BINARY = Path("src/dsec/_native/dsec-native")


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs `make -C native`, which is incremental."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and put the binary into wheels; a source distribution carries the sources alone."""
        if self.target_name != "wheel":
            return
        self._compile()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version != "editable":
            build_data["force_include"][str(Path(self.root, BINARY))] = "dsec/_native/dsec-native"

    def _compile(self) -> None:
        compiler = os.environ.get("CC") or "cc"
        missing = [tool for tool in (compiler.split()[0], "make") if shutil.which(tool) is None]
        if missing:
            raise RuntimeError(
                f"dsec builds a small static C program and {' and '.join(missing)} is not on the PATH. "
                "On Debian or Ubuntu: apt-get install build-essential. Another compiler: set CC."
            )
        done = subprocess.run(
            ["make", "-C", str(Path(self.root, "native")), "all", f"CC={compiler}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"compiling native/ with {compiler} failed (exit {done.returncode}):\n{done.stdout[-6000:]}")
