"""What the tests of the rollouts job share: a small project with a bug, and a harness that really runs, on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import pytest

PROJECT = Path(__file__).resolve().parents[2]
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

from examples.rollouts.agent import Agent  # noqa: E402
from examples.rollouts.task import Release, Task  # noqa: E402
from libdsec.schema import FileStat  # noqa: E402

BROKEN = """\
def add(a, b):
    return a - b


def double(a):
    return 2 * a
"""
FIXED = BROKEN.replace("a - b", "a + b")
TESTS = """\
import unittest

from sums import add, double


class SumsTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)

    def test_double(self):
        self.assertEqual(double(2), 4)

    def test_none(self):
        self.skipTest("not yet")
"""


_KINDS: dict[int, Literal["file", "directory", "symlink", "fifo"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
}


class LocalFiles:
    """`SandboxFiles` over a folder of this machine: lstat for what is there, a plain read that blocks where a plain read does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.before_read: list[tuple[str, bytes]] = []
        """Swaps to do between listing and reading, as a process of the agent's would."""

    async def list(self, path: str, *, recursive: bool = False) -> list[FileStat]:
        assert recursive
        return await asyncio.to_thread(self._list, path)

    def _list(self, path: str) -> list[FileStat]:
        found = []
        for entry in sorted(Path(path).rglob("*")):
            info = entry.lstat()
            kind = _KINDS[stat.S_IFMT(info.st_mode)]
            found.append(
                FileStat(path=str(entry), kind=kind, size=info.st_size, mode=info.st_mode & 0o7777, uid=0, gid=0, mtime=info.st_mtime)
            )
        return found

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        for name, content in self.before_read:
            (self.root / name).write_bytes(content)
        if stat.S_ISFIFO(os.lstat(path).st_mode):
            await asyncio.Event().wait()
        content = await asyncio.to_thread(Path(path).read_bytes)
        for start in range(0, len(content), 50):
            yield content[start : start + 50]


class LocalProcess:
    """`HarnessProcess` over a child of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout

    async def write_stdin(self, data: bytes) -> None:
        self.stdin.write(data)
        await self.stdin.drain()

    async def close_stdin(self) -> None:
        self.stdin.close()
        await self.stdin.wait_closed()

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        # Small pieces, so that lines come cut in the middle.
        while piece := await self.stdout.read(7):
            yield 1, piece


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that the user nobody can enter, unlike tmp_path."""
    folder = Path(tempfile.mkdtemp(prefix="rollouts-test-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """A task whose project lies in a folder of this machine."""

    class Local(Task):
        @property
        def root(self) -> str:
            return str(tmp_path / "sums-1")

    project = tmp_path / "sums-1"
    (project / "src" / "sums").mkdir(parents=True)
    (project / "src" / "sums" / "__init__.py").write_text(BROKEN)
    (project / "tests").mkdir()
    (project / "tests" / "__init__.py").touch()
    (project / "tests" / "test_sums.py").write_text(TESTS)
    return Local("sums", Release("sums", "1", ""), Release("sums", "2", ""), "src/sums", "tests", "add() subtracts. Fix it.")


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    """An agent whose harness runs beside this process."""
    harness = PROJECT / "examples" / "rollouts" / "toolkit" / "harness.py"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-I", str(harness)], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    local = LocalProcess(process)
    try:
        yield Agent(local, call_seconds=20)
    finally:
        if process.returncode is None:
            local.stdin.close()
            await process.wait()
        # The loop closes the pipe's transport one turn after the process is reaped.
        while not local.stdout.at_eof():
            await local.stdout.read()


@pytest.fixture
def local_files() -> type[LocalFiles]:
    """The class, for tests that choose the folder."""
    return LocalFiles


@pytest.fixture
def project_texts() -> dict[str, str]:
    """The small project's module as it is, as it should be, and its tests."""
    return {"broken": BROKEN, "fixed": FIXED, "tests": TESTS}
