"""Compiles and mounts slowstore.c: a folder as if it were on a far file system, at a set bandwidth and a set time for each request."""

from __future__ import annotations

import contextlib
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers import PeerUnavailable

__all__ = ["SlowStore", "StoreTraffic", "compile_slow_store"]

SOURCE = Path(__file__).with_name("slowstore.c")
MB = 1e6


@dataclass(frozen=True, slots=True)
class StoreTraffic:
    """What crossed the line: all requests (names and attributes too), and of them the reads and writes with their bytes."""

    requests: int
    reads: int
    bytes_read: int
    writes: int
    bytes_written: int
    busy_ns: int
    """Time that the line was taken by bytes."""

    def since(self, before: StoreTraffic) -> StoreTraffic:
        """The difference."""
        return StoreTraffic(*(now - then for now, then in zip(asdict(self).values(), asdict(before).values(), strict=True)))

    def to_json(self) -> dict[str, float]:
        """Counts, and megabytes of 10^6."""
        return {
            "requests": self.requests,
            "read_requests": self.reads,
            "read_mb": round(self.bytes_read / MB, 1),
            "kb_each_read": round(self.bytes_read / 1e3 / self.reads, 1) if self.reads else 0,
            "written_mb": round(self.bytes_written / MB, 2),
            "line_busy_s": round(self.busy_ns / 1e9, 2),
        }


def compile_slow_store(folder: Path) -> Path:
    """The program, in `folder`. PeerUnavailable without a compiler or FUSE."""
    if not Path("/dev/fuse").exists():
        raise PeerUnavailable("/dev/fuse is not there")
    compiler = shutil.which("cc")
    if compiler is None:
        raise PeerUnavailable("cc is not installed")
    program = folder / "slowstore"
    argv = [compiler, "-O2", "-pthread", "-o", str(program), str(SOURCE)]
    built = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise PeerUnavailable(f"cc: {built.stderr[-300:]}")
    return program


class SlowStore:
    """One mount. Every mount begins with nothing in the page cache: what was read through another is not known to this one."""

    def __init__(self, target: Path, counters: Path) -> None:
        self.target, self._counters = target, counters

    @classmethod
    @contextlib.contextmanager
    def mounted(cls, program: Path, source: Path, folder: Path, *, mb_per_s: float, request_ms: float) -> Iterator[SlowStore]:
        """`source` at a mount below `folder`, which goes at the end whoever still uses it."""
        target, counters = folder / "far", folder / "far-counters"
        target.mkdir(parents=True, exist_ok=True)
        counters.unlink(missing_ok=True)
        argv = [str(program), str(source), str(target), f"{mb_per_s:g}", f"{request_ms * 1e3:g}", str(counters)]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != b"ready\n":
                    raise RuntimeError(f"slowstore ended with {process.wait()}")
                yield cls(target, counters)
            finally:
                subprocess.run(["umount", "-l", str(target)], check=False, stderr=subprocess.DEVNULL)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()

    def traffic(self) -> StoreTraffic:
        """So far."""
        return StoreTraffic(*struct.unpack("6Q", self._counters.read_bytes()[:48]))
