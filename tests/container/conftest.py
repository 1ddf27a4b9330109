"""A container backend on the real kernel, with an environment of busybox."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dsec.backends.container.backend import ContainerBackend
from dsec.backends.container.channel import ContainerChannel
from dsec.backends.protocol import ChannelEvent, SandboxSpec
from dsec.environments import EnvironmentStore, ScratchStore, build
from libdsec.errors import DSecError
from libdsec.schema import ContainerRunArgs, ExecRequest


@dataclass
class Home:
    """State and run folder with the environment `tiny` in its store."""

    state: Path
    run: Path
    environments: EnvironmentStore
    layers: list[str]

    def backend(self) -> ContainerBackend:
        return ContainerBackend(self.environments, ScratchStore(self.state, self.run), self.run)


@pytest.fixture(scope="module")
def home(module_state_run, tiny_rootfs):
    environments = EnvironmentStore(module_state_run.state, module_state_run.run)
    build(environments, "tiny", source=f"dir:{tiny_rootfs}", kind="base")
    layers = [str(layer) for layer in environments.resolve(["tiny"]).layers]
    yield Home(module_state_run.state, module_state_run.run, environments, layers)
    environments.sweep_mounts([])
    ScratchStore(module_state_run.state, module_state_run.run).close(unmount=True)


@dataclass
class Box:
    """A sandbox, its channel, and short ways to use them."""

    spec: SandboxSpec
    channel: ContainerChannel
    backend: ContainerBackend
    numbers: itertools.count = field(default_factory=itertools.count)

    def op(self) -> str:
        return f"op-{next(self.numbers)}"

    async def run(self, *argv: str, **options):
        return await self.channel.exec(self.op(), ExecRequest(argv=list(argv), **options))

    async def sh(self, text: str, **options):
        return await self.channel.exec(self.op(), ExecRequest(shell=text, **options))

    async def out(self, text: str, **options) -> str:
        """Standard output of a command that has to succeed."""
        result = await self.sh(text, **options)
        assert result.exit_code == 0, result
        return result.stdout.decode()

    async def first_line(self, *argv: str, **options) -> str:
        """Of the output of a command that is started and goes on."""
        op = self.op()
        await self.channel.start(op, ExecRequest(argv=list(argv), **options))
        attachment = await self.channel.attach(op)
        said = b""
        try:
            async with asyncio.timeout(10):
                while b"\n" not in said:
                    item = await anext(attachment)
                    said += getattr(item, "data", b"")
        finally:
            await attachment.aclose()
        return said.decode().partition("\n")[0]

    def group(self, controller: str = "unified") -> Path:
        plan = self.backend._cgroups.plan(self.spec.sandbox_id, _no_limits())
        if controller == "unified" and plan.v2 is not None:
            return Path(plan.v2)
        return next(Path(path) for path in plan.dirs if controller in path.split("/")[4].split(","))


def _no_limits():
    from dsec.resources.plan import Limits

    return Limits()


class Factory:
    """Makes sandboxes of one backend and remembers the events."""

    def __init__(self, home: Home, backend: ContainerBackend) -> None:
        self.home = home
        self.backend = backend
        self.events: list[tuple[str, ChannelEvent]] = []
        self._numbers = itertools.count()

    def spec(self, **args) -> SandboxSpec:
        sandbox_id = f"sb-t-{next(self._numbers)}"
        spec_fields = {name: args.pop(name) for name in ("env", "workdir", "user", "hostname", "layers", "generation") if name in args}
        spec_fields = {"layers": self.home.layers, "generation": 1, **spec_fields}
        args = {"memory_limit_mb": 256, "cpu_cores_limit": 2, "pids_limit": 128, "disk_limit_mb": 64, **args}
        return SandboxSpec(
            sandbox_id=sandbox_id, args=ContainerRunArgs(**args), range_index=self.backend.lease_range(sandbox_id), **spec_fields
        )

    async def __call__(self, **args) -> Box:
        spec = self.spec(**args)
        return Box(spec, await self.backend.create(spec), self.backend)

    def kinds(self, sandbox_id: str) -> list[str]:
        return [event.kind for owner, event in self.events if owner == sandbox_id]


@pytest.fixture
async def boxes(home):
    """The factory; all that it made is destroyed afterwards, and nothing may be left."""
    backend = home.backend()
    factory = Factory(home, backend)
    await backend.open(lambda sandbox_id, event: factory.events.append((sandbox_id, event)))
    try:
        yield factory
        for sandbox_id in await backend.owned():
            await backend.destroy_unknown(sandbox_id)
        assert await backend.owned() == set()
    finally:
        for sandbox_id in await backend.owned():
            with contextlib.suppress(DSecError):
                await backend.destroy_unknown(sandbox_id)
        await backend.aclose()


@pytest.fixture
async def box(boxes):
    return await boxes()


@pytest.fixture(scope="session")
def mischief_program() -> bytes:
    """tests/container/mischief.c as a static program. Cached."""
    source = Path(__file__).with_name("mischief.c")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    cache = Path(__file__).resolve().parents[2] / "build" / "test-cache"
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / f"mischief-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = Path(folder, "mischief")
            subprocess.run([compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-o", fresh, source], check=True)
            fresh.rename(built)
    return built.read_bytes()


@pytest.fixture
def mischief(mischief_program):
    """`await mischief(box, "lease", path)` starts the program in that sandbox and gives the first line that it says; it goes on."""

    async def begin(box: Box, *words: str) -> str:
        files = await box.channel.files("root")
        try:
            opened = await files.open_write("/root/mischief", mode=0o755)
            with os.fdopen(opened.fd, "wb") as file:
                file.write(mischief_program)
            await files.commit(opened, "/root/mischief")
        finally:
            await files.aclose()
        return await box.first_line("/root/mischief", *words)

    return begin


async def until(condition, seconds: float = 10.0):
    """Poll until `condition()` (or its awaited value) is true; gives that value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture():
    return until
