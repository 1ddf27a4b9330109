"""Layers whose contents are in packs, and a store that can be told to misbehave."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dsec.environments import EnvironmentStore
from dsec.environments.manifest import Manifest
from dsec.environments.names import Reference
from dsec.environments.packs import Packer
from dsec.environments.publish import draft_tree, publish_drafts
from dsec.environments.trees.walk import walk


class SlowStore:
    """`slow_store.py` in a process of its own, over `source`, seen at `target`."""

    def __init__(self, source: Path, target: Path, log: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        self.source, self.target, self._log = source, target, log
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("slow_store.py")), str(self.source), str(self.target), str(self._log)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def tell(self, line: str) -> None:
        """One of the lines that it obeys."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def reads(self) -> list[tuple[str, int, int]]:
        """Name, offset and size of each read so far."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(name, int(offset), int(size)) for name, offset, size in (line.split() for line in lines)]

    def forget_reads(self) -> None:
        self._log.write_text("")

    def vanish(self) -> None:
        """Its server dies and its mount goes."""
        self._end()
        subprocess.run(["umount", "-l", str(self.target)], check=True)

    def come_back(self) -> None:
        self.process = self._start()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            # what was not flushed when it died is nobody's any more
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def close(self) -> None:
        """Let go of whoever waits for it, and unmount."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.tell("stall 0")
        self._end()
        subprocess.run(["umount", "-l", str(self.target)], check=False, capture_output=True)


def make_layer(environments: EnvironmentStore, name: str, tree: Path) -> Manifest:
    """Publish the folder as the base `name`."""
    store = environments.layers
    store.prepare()
    with store.building.lease() as folder:
        packer = Packer(folder)
        root = walk(tree, packer.add)
        pack = packer.finish()
        draft = draft_tree(root, pack=pack, folder=folder, kind="base", source="dir", reference=Reference(name, tag="latest"))
        [manifest] = publish_drafts(store, [draft], pack=pack, folder=folder)
        return manifest


def eventually(holds: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def environments_at(state: Path, run: Path, store: Path, **settings: object) -> Iterator[EnvironmentStore]:
    """A node's view of `store`; everything is unmounted at the end."""
    from dsec.environments import StoreSettings

    environments = EnvironmentStore(state, run, store, settings=StoreSettings(**settings))  # type: ignore[arg-type]
    try:
        yield environments
    finally:
        environments.sweep_mounts([])
        environments.close()


def store_of_roots(places, rootfs: Path, folder: Path, names: tuple[str, ...], furnish: Callable[[Path], None]) -> SlowStore:
    """A slow store below `folder` with an environment for each name: a copy of `rootfs` to which `furnish` adds what is its own."""
    builder = EnvironmentStore(places.state / "builder", places.run / "builder", folder / "store")
    for name in names:
        root = folder / name
        shutil.copytree(rootfs, root, symlinks=True)
        furnish(root)
        make_layer(builder, name, root)
    return SlowStore(folder / "store", folder / "seen", folder / "reads")
