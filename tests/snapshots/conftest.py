"""A real edge over real containers, whose guests have a program that does what it is told to files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

import guest_tree

import dsec.backends.container.backend  # noqa: F401  takes long enough to be told from a blocking call
from dsec.edge import Edge, EdgeSettings, build_edge
from dsec.environments import EnvironmentStore, ScratchStore, build
from dsec.resources.plan import Limits
from dsec.resources.uid_ranges import range_base
from libdsec.schema import ContainerRunArgs, CreateRequest, ExecRequest, ForkRequest, PackInfo, PackRequest

# The first loop of libuv in a process makes a pipe for signals that stays: made here, no test is held to have left it.
uvloop.new_event_loop().close()

ALIVE = ("running", "pausing", "paused", "resuming")


@pytest.fixture(scope="session")
def filer_program():
    """tests/snapshots/filer.c as a static program. Cached."""
    source = Path(__file__).with_name("filer.c")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    cache = Path(__file__).resolve().parents[2] / "build" / "test-cache"
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / f"filer-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = Path(folder, "filer")
            subprocess.run([compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-o", fresh, source], check=True)
            fresh.rename(built)
    return built


@dataclass
class Home:
    """The folders of one instance, whose store has the base `tiny`; a node's settings."""

    state: Path
    run: Path
    store: None = None


@pytest.fixture(scope="session")
def base_root(tiny_rootfs, filer_program, tmp_path_factory):
    """The tiny root with the filer, an empty /t, and some things to hide, to rename and to renew."""
    root = tmp_path_factory.mktemp("base") / "root"
    shutil.copytree(tiny_rootfs, root, symlinks=True)
    shutil.copy2(filer_program, root / "bin/filer")
    (root / "t").mkdir()
    (root / "below/deep").mkdir(parents=True)
    for name in ("below/one", "below/two", "below/deep/three", "tmp/of-the-base", "etc/machine-id"):
        (root / name).write_text(name)
    (root / "var/lib/systemd").mkdir(parents=True)
    (root / "var/lib/systemd/random-seed").write_bytes(b"seed")
    return root


@pytest.fixture(scope="module")
def home(module_state_run, base_root):
    environments = EnvironmentStore(module_state_run.state, module_state_run.run)
    build(environments, "tiny", source=f"dir:{base_root}", kind="base")
    yield Home(module_state_run.state, module_state_run.run)
    environments.sweep_mounts([])
    ScratchStore(module_state_run.state, module_state_run.run).close(unmount=True)


@pytest.fixture(scope="module")
def server(home, module_state_run, start_node):
    """`dsec up` on `home`, for modules that open no edge themselves."""
    started = start_node(module_state_run, home.state / "store")
    try:
        warmed = started.dsec("run", "tiny", "true")
        assert warmed.returncode == 0, warmed.stderr.decode()
        yield started
    finally:
        started.process.terminate()
        started.process.wait(30)
        started.dsec("down")


@dataclass
class Box:
    """A sandbox of an edge, and short ways to use it."""

    node: Node
    id: str

    @property
    def spec(self):
        return self.node.edge._core.sandboxes[self.id].spec

    @property
    def backend(self):
        return self.node.edge._core.backends["container"]

    async def sh(self, text: str, **options) -> str:
        """Standard output of a command that has to succeed."""
        result = await self.node.edge.exec(self.id, ExecRequest(shell=text, **options))
        assert result.exit_code == 0, result
        return result.stdout.decode()

    async def background(self, text: str) -> None:
        """Start what goes on by itself."""
        await self.node.edge.start(self.id, ExecRequest(shell=text, background=True))

    async def file(self, lines: list[str]) -> str:
        """Let the filer do it."""
        result = await self.node.edge.exec(self.id, ExecRequest(argv=["/bin/filer"], stdin="\n".join([*lines, ""]).encode()))
        assert result.exit_code == 0, (result.stdout, [line[:200] for line in lines])
        return result.stdout.decode()

    async def pack(self, name: str, **options) -> PackInfo:
        info = await self.node.edge.pack_diff(self.id, PackRequest(name=name, **options), wait=60)
        assert info.state == "published", info
        return info

    async def fork(self, count: int = 1, **options) -> list[Box]:
        result = await self.node.edge.fork(self.id, ForkRequest(count=count, **options))
        assert not result.errors, result
        return [Box(self.node, info.sandbox_id) for info in result.sandboxes]

    async def stop(self) -> None:
        await self.node.edge.stop(self.id)

    def root(self) -> Path:
        """Its root folder as seen from the host."""
        groups = {f"{folder}/cgroup.procs" for top in self.backend._cgroups.plan(self.id, Limits()).dirs for folder, _, _ in os.walk(top)}
        for pid in {line for group in groups for line in Path(group).read_text().split()} - {"0"}:
            status = Path(f"/proc/{pid}/status").read_text()
            if next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1] == "1":
                return Path(f"/proc/{pid}/root")
        raise AssertionError("it has no init")

    def tree(self, path: str = "/t", *, times: bool = False) -> dict[bytes, tuple]:
        return guest_tree.read(Path(f"{self.root()}{path}"), range_base(self.spec.range_index), times=times)


@dataclass
class Node:
    """A home and the edge that is open on it."""

    home: Home
    settings: dict
    edge: Edge | None = None
    _names: int = 0

    async def open(self) -> None:
        self.edge = build_edge(self.home, edge_settings=EdgeSettings(**self.settings))
        await self.edge.open()

    async def restart(self) -> None:
        await self.edge.aclose()
        await self.open()

    async def create(self, image: str = "tiny", **args) -> Box:
        args = {"memory_limit_mb": 256, "pids_limit": 64, "disk_limit_mb": 256, **args}
        return await self._made(ContainerRunArgs(container_image=image, **args))

    async def stack(self, *layers: str) -> Box:
        return await self._made(ContainerRunArgs(environment=list(layers), memory_limit_mb=256, disk_limit_mb=256))

    async def _made(self, args: ContainerRunArgs) -> Box:
        return Box(self, (await self.edge.create(CreateRequest(args=args))).sandboxes[0].sandbox_id)

    def box(self, sandbox_id: str) -> Box:
        return Box(self, sandbox_id)

    def name(self) -> str:
        """One that was not used yet."""
        self._names += 1
        return f"snap-{os.getpid()}-{id(self)}-{self._names}"

    @property
    def backend(self):
        return self.edge._core.backends["container"]

    async def stop_all(self) -> None:
        await asyncio.gather(*(self.edge.stop(info.sandbox_id) for info in await self.edge.list() if info.state in ALIVE))

    async def settled(self) -> None:
        """All that ends has ended; nothing is left of sandboxes and snapshots."""
        await self.stop_all()
        await until(self.nothing_packs)
        assert await self.backend.owned() == set()

    async def nothing_packs(self) -> bool:
        """No snapshot is there, and only sandboxes hold layers."""
        owners = {owner for owners in self.edge.environments.node.uses().values() for owner in owners}
        return not await self.backend.snapshots() and owners <= self.edge._core.sandboxes.keys()


async def until(condition, seconds: float = 20.0):
    """Poll until `condition()` (or its awaited value) is true; gives that value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


@pytest.fixture(name="until")
def until_fixture():
    return until


@asynccontextmanager
async def open_node(home, **settings):
    """An edge on `home`, all of whose sandboxes are stopped in the end."""
    node = Node(home, settings)
    await node.open()
    try:
        yield node
        await node.settled()
    finally:
        await node.stop_all()
        await node.edge.aclose()


@pytest.fixture(name="open_node")
def open_node_fixture():
    return open_node


@pytest.fixture
async def node(home):
    async with open_node(home) as node:
        yield node
