"""The way that most nodes have: an image is pulled and unpacked whole before the first sandbox of it can start.

Layers are read from the same store as ours, decompressed and unpacked as they come (docker writes the archive to its disk first), each
once however many images have it, three at a time. The job then runs under bubblewrap on an overlay of the layers, made once an image: no
daemon, no cgroup, no writable root, the least that a sandbox can cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.corpus import Corpus, Image
from benchmarks.host import unmount_below
from benchmarks.layout import LayerBlob, decompressor
from benchmarks.peers.base import run_command, which

__all__ = ["EagerNode"]

PULLS_AT_ONCE = 3
"""As docker has it."""


class EagerNode:
    """One node that has seen nothing yet; everything that it keeps is below `folder`."""

    def __init__(self, corpus: Corpus, layout: Path, folder: Path) -> None:
        self._layout, self._folder = layout, folder
        self._bwrap, self._tar = which("bwrap"), which("tar")
        self._slots = asyncio.Semaphore(PULLS_AT_ONCE)
        self._layers: dict[str, asyncio.Task[Path]] = {}
        self._roots: dict[str, asyncio.Task[Path]] = {}
        for layer in corpus.layers():
            which(decompressor(layer.compression)[0])

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, corpus: Corpus, layout: Path, folder: Path) -> AsyncIterator[EagerNode]:
        """At the end nothing of it is left."""
        folder.mkdir()
        node = cls(corpus, layout, folder)
        try:
            yield node
        finally:
            for task in (*node._roots.values(), *node._layers.values()):
                task.cancel()
            unmount_below(folder)
            await asyncio.to_thread(shutil.rmtree, folder)

    async def run(self, image: Image) -> None:
        """Pull the image unless that is done or under way, then run its job. RuntimeError if the job fails."""
        root = await self.pulled(image)
        argv = [self._bwrap, "--ro-bind", str(root), "/", "--unshare-all", "--uid", "0", "--gid", "0", "--proc", "/proc", "--dev", "/dev"]
        argv += ["--tmpfs", "/tmp", "--die-with-parent", "--chdir", image.job.cwd, "--", *image.job.argv]
        await run_command(argv, timeout=600)

    async def pulled(self, image: Image) -> Path:
        """The image's root, mounted."""
        if image.name not in self._roots:
            self._roots[image.name] = asyncio.create_task(self._compose(image))
        return await asyncio.shield(self._roots[image.name])

    async def _compose(self, image: Image) -> Path:
        for layer in image.layers:
            if layer.digest not in self._layers:
                self._layers[layer.digest] = asyncio.create_task(self._unpack(layer))
        folders = [await self._layers[layer.digest] for layer in image.layers]
        root = self._folder / f"root-{image.name}"
        root.mkdir()
        lower = ":".join(str(folder) for folder in reversed(folders))
        await run_command(["mount", "-t", "overlay", "-o", f"ro,lowerdir={lower}", "overlay", str(root)])
        return root

    async def _unpack(self, layer: LayerBlob) -> Path:
        target = self._folder / layer.digest.removeprefix("sha256:")[:12]
        async with self._slots:
            await asyncio.to_thread(unpack_layer, self._layout / layer.path, layer, target, self._tar)
        return target


def unpack_layer(blob: Path, layer: LayerBlob, target: Path, tar: str = "tar") -> float:
    """Decompress and untar in one stream; seconds it took. RuntimeError if either fails."""
    started = time.perf_counter()
    target.mkdir(parents=True, exist_ok=True)
    with blob.open("rb") as file:
        with subprocess.Popen(decompressor(layer.compression), stdin=file, stdout=subprocess.PIPE) as source:
            argv = [tar, "-C", str(target), "--numeric-owner", "--delay-directory-restore", "-xf", "-"]
            done = subprocess.run(argv, stdin=source.stdout, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0 or source.returncode != 0:
        raise RuntimeError(
            f"{blob.name[:12]}: unpacking ended with {source.returncode}, {done.returncode}: {os.fsdecode(done.stderr[-300:])}"
        )
    return time.perf_counter() - started
