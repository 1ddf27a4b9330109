"""Collection of garbage in a store that others use meanwhile: builds, nodes, and collections on other nodes.

What is found unused gets a mark (`condemned`), and goes when it has had it for the time of grace. Whoever comes to refer to a thing takes
its mark away, under the lock that removals have alone. So a removal needs the lock only for the renames:

    1. look; mark what is unused, unmark what is used
    2. take and release the lock: whoever refers without having seen the marks is through
    3. look again: what is unused now, and still has its mark when the lock is held, nobody refers to
    4. rename it into a leased folder under the lock, a few at a time; delete that afterwards

A kill at any point leaves marks, or a leased folder that the next sweep removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from dsec.environments.condemned import Thing
from dsec.environments.holders import forget_silent, holdings
from dsec.environments.manifest import decode_manifest
from dsec.environments.packs.index import data_name, index_name
from dsec.environments.store import MANIFEST, LayerStore
from dsec.environments.tags import DamagedTag
from dsec.environments.unused import Inventory, LayerReferences, find_unused
from libdsec.errors import NotFound, SandboxFailed

__all__ = ["GRACE_SECONDS", "SILENT_SECONDS", "Garbage", "GarbageReport"]

GRACE_SECONDS: Final = 3600.0
"""Long enough that whoever has just been told a digest comes to use it."""

SILENT_SECONDS: Final = 7 * 86400.0
"""A node that was not heard of for so long holds nothing any more."""

_AT_ONCE: Final = 128
"""Renames under one lock."""
_ORDER: Final[tuple[Thing, ...]] = ("import", "trace", "layer", "pack")
"""What refers goes before what it refers to."""


class GarbageReport(msgspec.Struct, kw_only=True):
    """What a collection removed (or would remove), and what it left for later."""

    layers: list[str] = []
    packs: list[str] = []
    imports: int = 0
    traces: int = 0
    builds: int = 0
    """Folders of builds that died."""
    bytes: int = 0
    waiting: int = 0
    """Things that are unused, but not for long enough."""
    waiting_bytes: int = 0
    unreadable: list[str] = []
    """Layers in use, or tags, that are damaged. While there are any no layer and no pack is removed."""
    skipped: bool = False
    """Another collection is at work, or was a short time ago."""
    dry_run: bool = False


class Garbage:
    """Collections in `store`. `held` gives the layers that this node uses, by what it knows itself."""

    def __init__(self, store: LayerStore, held: Callable[[], Collection[str]]) -> None:
        self._store = store
        self._held = held
        self._references: dict[str, LayerReferences] = {}

    def collect(
        self, *, grace_seconds: float, dry_run: bool = False, not_within_seconds: float = 0.0, silent_seconds: float = SILENT_SECONDS
    ) -> GarbageReport:
        """Remove what has been known to be unused for `grace_seconds`. With `dry_run` only tell; nothing is marked then.

        Does nothing if another collection is at work or ended less than `not_within_seconds` ago. SandboxFailed(cause="store-lost") if the
        store cannot be read whole: then nothing is removed.
        """
        try:
            with self._alone(not_within_seconds, dry_run) as mine:
                if not mine:
                    return GarbageReport(skipped=True, dry_run=dry_run)
                return self._collect(grace_seconds, dry_run, silent_seconds)
        except OSError as error:
            raise SandboxFailed(f"the store cannot be read whole: {error}", cause="store-lost", ran="unknown") from error

    @contextlib.contextmanager
    def _alone(self, not_within_seconds: float, dry_run: bool) -> Iterator[bool]:
        """The lock's time of change says when the last collection ended."""
        fd = os.open(self._store.root / "garbage.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            ended = os.fstat(fd)
            if not_within_seconds and ended.st_size and self._store.now() - ended.st_mtime < not_within_seconds:
                yield False
                return
            yield True
            if not dry_run:
                os.pwrite(fd, b"1", 0)
                os.utime(fd)
        finally:
            os.close(fd)

    # -- a collection --------------------------------------------------------------------------------------------------------------------

    def _collect(self, grace: float, dry_run: bool, silent: float) -> GarbageReport:
        report = GarbageReport(dry_run=dry_run)
        condemned = self._store.condemned
        now = self._store.now()
        marks = condemned.all()
        unused, report.unreadable = self._look(now, silent, grace)
        if not dry_run:
            for kind, digest in marks.keys() - unused:
                condemned.pardon(kind, digest)
            for kind, digest in unused - marks.keys():
                condemned.mark(kind, digest)
        fresh = {thing for thing in unused if thing not in marks}
        due = {thing for thing in unused if (grace <= 0 if thing in fresh else now - marks[thing] >= grace)}
        due = {thing for thing in due if self._old(thing, now, grace)}
        if due and not dry_run:
            with self._store.settled(exclusive=True):
                pass
            unused, report.unreadable = self._look(now, silent, grace)
            due &= unused
        for thing in unused - due:
            report.waiting += 1
            report.waiting_bytes += self._size(thing)
        ordered = sorted(due, key=lambda thing: (_ORDER.index(thing[0]), thing[1]))
        if dry_run:
            for thing in ordered:
                _count(report, thing, self._size(thing))
            return report
        for start in range(0, len(ordered), _AT_ONCE):
            self._remove(ordered[start : start + _AT_ONCE], now, grace, report)
        forget_silent(self._store, now=now, silent_seconds=silent)
        report.builds = len(self._store.building.sweep())
        return report

    def _look(self, now: float, silent: float, grace: float) -> tuple[set[tuple[Thing, str]], list[str]]:
        store = self._store
        roots: set[str] = set(self._held())
        damaged: list[str] = []
        for reference in store.tags.names():
            try:
                roots.add(store.digest_of(reference))
            except DamagedTag:
                damaged.append(str(reference))
            except NotFound:
                pass  # it was removed meanwhile
        for holder in holdings(store, now=now, silent_seconds=silent):
            roots |= holder.digests
        imports: dict[str, str] = {}
        for tar, layer, used_at in self._imports():
            imports[tar] = layer
            if now - used_at < grace:  # a build may be reading it
                roots.add(layer)
        names = [name for name in os.listdir(store.root / "layers") if len(name) == 64]
        inventory = Inventory(
            layers={f"sha256:{name}": self._refers(f"sha256:{name}") for name in names},
            packs={f"sha256:{name[:64]}" for name in os.listdir(store.packs.folder) if len(name) > 64},
            roots=roots,
            imports=imports,
            traces={f"sha256:{name[:64]}" for name in os.listdir(store.root / "traces") if len(name) >= 64},
        )
        unused, unreadable = find_unused(inventory)
        if damaged:
            unused = {thing for thing in unused if thing[0] in ("import", "trace")}
        for gone in self._references.keys() - inventory.layers.keys():
            del self._references[gone]
        return unused, [*damaged, *unreadable]

    def _refers(self, digest: str) -> LayerReferences | None:
        if (known := self._references.get(digest)) is None:
            try:
                identity = decode_manifest((self._store.folder(digest) / MANIFEST).read_bytes(), digest).identity
            except (FileNotFoundError, ValueError):
                return None
            known = LayerReferences(frozenset(use.digest for use in identity.packs), tuple(identity.below))
            self._references[digest] = known
        return known

    def _imports(self) -> Iterator[tuple[str, str, float]]:
        folder = self._store.root / "imports"
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                used_at = (folder / name).stat().st_mtime
                yield f"sha256:{name}", (folder / name).read_text(errors="replace").strip(), used_at

    # -- things --------------------------------------------------------------------------------------------------------------------------

    def _paths(self, thing: tuple[Thing, str]) -> list[Path]:
        """Its files and folders. That by which it is found comes first."""
        kind, digest = thing
        plain, root = digest.removeprefix("sha256:"), self._store.root
        match kind:
            case "layer":
                return [self._store.folder(digest)]
            case "pack":
                return [root / "packs" / index_name(digest), root / "packs" / data_name(digest)]
            case "import":
                return [root / "imports" / plain]
            case "trace":
                return [root / "traces" / f"{plain}.json"]

    def _old(self, thing: tuple[Thing, str], now: float, grace: float) -> bool:
        """Packs are made young by those who are about to refer to them."""
        if thing[0] != "pack":
            return True
        times = [path.stat().st_mtime for path in self._paths(thing) if path.exists()]
        return not times or now - times[0] >= grace

    def _size(self, thing: tuple[Thing, str]) -> int:
        total = 0
        for path in self._paths(thing):
            for file in path.iterdir() if path.is_dir() else (path,):
                with contextlib.suppress(FileNotFoundError):
                    total += file.stat().st_size
        return total

    def _remove(self, things: list[tuple[Thing, str]], now: float, grace: float, report: GarbageReport) -> None:
        store = self._store
        with store.building.lease() as trash:
            gone: list[tuple[Thing, str]] = []
            sizes = {thing: self._size(thing) for thing in things}
            with store.settled(exclusive=True):
                for thing in things:
                    if store.condemned.since(*thing) is None or not self._old(thing, now, grace):
                        continue
                    for path in self._paths(thing):
                        with contextlib.suppress(FileNotFoundError):
                            path.rename(trash / f"{secrets.token_hex(4)}-{path.name}")
                    gone.append(thing)
            for thing in gone:
                if thing[0] == "layer":
                    store.forget(thing[1])
                store.condemned.pardon(*thing)
                _count(report, thing, sizes[thing])
            shutil.rmtree(trash, onerror=_missing_is_fine)


def _count(report: GarbageReport, thing: tuple[Thing, str], size: int) -> None:
    kind, digest = thing
    report.bytes += size
    match kind:
        case "layer":
            report.layers.append(digest)
        case "pack":
            report.packs.append(digest)
        case "import":
            report.imports += 1
        case "trace":
            report.traces += 1


def _missing_is_fine(function: object, path: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
    if not (isinstance(failure[1], OSError) and failure[1].errno == errno.ENOENT):
        raise failure[1]
