"""Which nodes use which layers of a shared store: what a collection of garbage on any node must leave alone.

holders/<node>/layers       digests, one a line; its time of change is the node's last sign of life
holders/<node>/name         the node's host name, for people
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.environments.store import LayerStore, lost

__all__ = ["Holder", "Holding", "forget_silent", "holdings"]

_ID: Final = re.compile(r"[0-9a-f]{16}")
_READ_ONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class Holder:
    """A node as the store knows it: its id, name, last sign of life by the store's clock, and what it uses."""

    node: str
    name: str
    seen_at: float
    digests: frozenset[str]


class Holding:
    """This node's own entry, shared by its processes. On a store that it may not write to there is none: others do not know what it uses.

    What a node holds is what its mounts and owners say; who is about to mount holds before, so that the layer stays, and once more after,
    as another process may have put on record in between what it found without this.
    """

    def __init__(self, store: LayerStore, state: Path) -> None:
        self._store = store
        self._state = state
        self._node = ""

    @property
    def node(self) -> str:
        """This node's id, made at its first use."""
        if not self._node:
            self._node = _identity(self._state / "node-id")
        return self._node

    def hold(self, digests: Collection[str]) -> None:
        """From now on the node uses these, too. SandboxFailed(cause="store-lost") if one is not there, OSError if the store is not."""
        with self._alone():
            held = self._recorded()
            if not (new := [digest for digest in digests if digest not in held]):
                self._sign(held)
                return
            with self._store.settled(exclusive=False):
                for digest in new:
                    if not self._store.folder(digest).is_dir():
                        raise lost("", digest, "it is not in the store")
                self._record(held.union(new))
                with _tolerated():
                    for digest in new:
                        self._store.refer(digest)

    def keep(self, used: Callable[[], Collection[str]]) -> None:
        """The node lives, and uses just what `used` says, which is asked when nobody else changes the record."""
        with self._alone():
            digests = frozenset(used())
            if self._recorded() != digests:
                with self._store.settled(exclusive=False):
                    self._record(digests)
            elif digests:
                self._sign(digests)

    def _sign(self, recorded: frozenset[str]) -> None:
        """A sign of life. Who takes this node for dead does so alone."""
        with self._store.settled(exclusive=False), _tolerated():
            try:
                os.utime(self._folder / "layers")
            except FileNotFoundError:
                self._record(recorded)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._state / "holding.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @property
    def _folder(self) -> Path:
        return self._store.root / "holders" / self.node

    def _recorded(self) -> frozenset[str]:
        try:
            return frozenset((self._folder / "layers").read_text().split())
        except FileNotFoundError:
            return frozenset()

    def _record(self, digests: frozenset[str]) -> None:
        """By a rename: it is there wholly or as it was. The crash that would undo it ends the sandboxes, too."""
        with _tolerated():
            if not (self._folder / "name").exists():
                for folder in (self._folder.parent, self._folder):
                    folder.mkdir(exist_ok=True, mode=0o700)
                (self._folder / "name").write_text(socket.gethostname() + "\n")
            fresh = self._folder / ".layers"
            fresh.write_text("".join(f"{digest}\n" for digest in sorted(digests)))
            fresh.rename(self._folder / "layers")


def holdings(store: LayerStore, *, now: float, silent_seconds: float) -> list[Holder]:
    """All nodes that were heard of in the last `silent_seconds`. `now` is by the store's clock. OSError if the store cannot be read."""
    found: list[Holder] = []
    for folder in sorted((store.root / "holders").iterdir()):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file = folder / "layers"
            seen_at = file.stat().st_mtime
            if now - seen_at <= silent_seconds:
                name = (folder / "name").read_text().strip()
                found.append(Holder(folder.name, name, seen_at, frozenset(file.read_text().split())))
    return found


def forget_silent(store: LayerStore, *, now: float, silent_seconds: float) -> None:
    """Remove the entries of nodes that are no more. One that is heard of at the last moment keeps its own."""
    for folder in (store.root / "holders").iterdir():
        with contextlib.suppress(OSError):
            if not _silent(folder, now, silent_seconds):
                continue
            with store.building.lease() as trash:
                with store.settled(exclusive=True):
                    if _silent(folder, now, silent_seconds):
                        folder.rename(trash / folder.name)


def _silent(folder: Path, now: float, silent_seconds: float) -> bool:
    return now - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > silent_seconds


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def _identity(path: Path) -> str:
    """The node's id; two processes that make it at once agree. A copy of a disk on another machine is another node, and gets its own."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    machine = _machine()
    fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            known, _, where = path.read_text(errors="replace").partition("\n")
            if _ID.fullmatch(known) and where.strip() == machine:
                return known
        made = secrets.token_hex(8)
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(f"{made}\n{machine}\n")
        fresh.rename(path)
        return made
    finally:
        os.close(fd)


def _machine() -> str:
    """What a clone gets anew, as far as can be told."""
    machine_id = ""
    with contextlib.suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text(errors="replace").strip()
    return f"{machine_id or '-'} {socket.gethostname()}"
