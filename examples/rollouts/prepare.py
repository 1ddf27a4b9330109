"""What the job needs before a sandbox can start: the releases, the fix between them, and the layers. Each is made once and kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsec.environments import EnvironmentStore
from libdsec import DSecError

from .fix import Edit, edits_between
from .layers import LAYERS, recipe
from .releases import fetch, unpack
from .task import Task

__all__ = ["PrepareError", "Prepared", "prepare"]

_BUILD_SECONDS = 600


class PrepareError(Exception):
    """A layer could not be built."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The task's material on this machine. `layers` is the reference with its digest by layer name."""

    task: Task
    fix: tuple[Edit, ...]
    pristine: dict[str, bytes]
    fixed: dict[str, bytes]
    modules: tuple[str, ...]
    layers: dict[str, str]


async def prepare(task: Task, state: Path, tell: Callable[[str], None]) -> Prepared:
    """Download, unpack, build what is not there yet. `tell` gets a line for each thing that takes time."""
    tell(f"sources of {task.old.folder} and {task.new.folder}")
    async with asyncio.TaskGroup() as group:
        archives = {release: group.create_task(fetch(release, state / "downloads")) for release in (task.old, task.new)}
    old, new = [unpack(archive.result(), release, state / "sources") for release, archive in archives.items()]
    layers = await _layers(task, state, old, new, tell)
    return Prepared(
        task=task,
        fix=tuple(edits_between(old / task.package, new / task.package)),
        pristine=_python_files(old / task.package),
        fixed=_python_files(new / task.package),
        modules=tuple(f"{task.tests}.{path.stem}" for path in sorted((new / task.tests).glob("test_*.py"))),
        layers=layers,
    )


def _python_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.py"))}


async def _layers(task: Task, state: Path, old: Path, new: Path, tell: Callable[[str], None]) -> dict[str, str]:
    """References with digests, building those that are missing or made from something else."""
    note = state / "layers.json"
    try:
        known: dict[str, str] = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        known = {}
    store = EnvironmentStore(state, state / "build-run")
    current = recipe(task)
    wanted = {layer.name: f"{layer.source} {' '.join(layer.include)}" if layer.fill is None else current for layer in LAYERS}
    stale = [name for name, made_from in wanted.items() if known.get(name) != made_from or _digest(store, name) is None]
    if stale:
        note.unlink(missing_ok=True)
        await _build(state, old, new, stale, tell)
        note.write_text(json.dumps(wanted))
    digests = {name: _digest(store, name) for name in wanted}
    return {name: f"{name}@{digest}" for name, digest in digests.items()}


def _digest(store: EnvironmentStore, name: str) -> str | None:
    try:
        return store.show(name).digest
    except DSecError:
        return None


async def _build(state: Path, old: Path, new: Path, names: list[str], tell: Callable[[str], None]) -> None:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "examples.rollouts.build", str(state), str(state / "build-run"), str(old), str(new), *names],
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(_BUILD_SECONDS):
            async for line in process.stdout:
                said.append(line.decode(errors="replace").rstrip())
                tell(said[-1])
            if await process.wait():
                raise PrepareError("layers could not be built:\n" + "\n".join(said[-30:]))
    except TimeoutError:
        raise PrepareError(f"layers were not built within {_BUILD_SECONDS} s") from None
    finally:
        await _end_group(process)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End the build with all that it started, first in the way that lets mmdebstrap clean up."""
    for number, seconds in ((signal.SIGINT, 10), (signal.SIGKILL, None)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
