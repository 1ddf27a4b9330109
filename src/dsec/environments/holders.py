"""Which nodes use which layers of a shared store: what a collection of garbage on any node must leave alone.

holders/<node>/layers       digests, one a line; its time of change is the node's last sign of life
holders/<node>/name         the node's host name, for people
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.environments.store import LayerStore

__all__ = ["Holder", "Holding", "forget_silent", "holdings"]

_READ_ONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class Holder:
    """A node as the store knows it: its id, name, last sign of life by the store's clock, and what it uses."""

    node: str
    name: str
    seen_at: float
    digests: frozenset[str]


class Holding:
    """This node's own entry. On a store that it may not write to there is none: the store's other users do not know what it uses."""

    def __init__(self, store: LayerStore, state: Path) -> None:
        self._store = store
        self._identity = state / "node-id"
        self._lock = threading.Lock()
        self._node = ""
        self._held: frozenset[str] | None = None

    @property
    def node(self) -> str:
        """This node's id, made at its first use."""
        if not self._node:
            self._node = _identity(self._identity)
        return self._node

    def hold(self, digests: Collection[str]) -> None:
        """From now on the node uses these, too. OSError if the store cannot be read; the layers may turn out not to be there."""
        with self._lock:
            held = self._known()
            if not held.issuperset(digests):
                with self._store.settled(exclusive=False):
                    self._write(held.union(digests))
                    for digest in digests:
                        if (self._store.folder(digest)).is_dir():
                            self._store.refer(digest)

    def keep(self, digests: Collection[str]) -> None:
        """The node uses just these, and lives."""
        with self._lock:
            if self._known() != frozenset(digests):
                with self._store.settled(exclusive=False):
                    self._write(frozenset(digests))
            elif digests:
                with _tolerated():
                    os.utime(self._folder / "layers")

    @property
    def _folder(self) -> Path:
        return self._store.root / "holders" / self.node

    def _known(self) -> frozenset[str]:
        if self._held is None:
            try:
                self._held = frozenset((self._folder / "layers").read_text().split())
            except FileNotFoundError:
                self._held = frozenset()
        return self._held

    def _write(self, digests: frozenset[str]) -> None:
        """By a rename: it is there wholly or as it was. The crash that would undo it ends the sandboxes, too."""
        with _tolerated():
            if not (self._folder / "name").exists():
                for folder in (self._folder.parent, self._folder):
                    folder.mkdir(exist_ok=True, mode=0o700)
                (self._folder / "name").write_text(socket.gethostname() + "\n")
            fresh = self._folder / f".{secrets.token_hex(4)}"
            fresh.write_text("".join(f"{digest}\n" for digest in sorted(digests)))
            fresh.rename(self._folder / "layers")
        self._held = digests


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
    """Remove the entries of nodes that are no more."""
    for folder in (store.root / "holders").iterdir():
        with contextlib.suppress(OSError):
            if now - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > silent_seconds:
                shutil.rmtree(folder)


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def _identity(path: Path) -> str:
    """Two processes that make it at once agree."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    while True:
        with contextlib.suppress(FileNotFoundError):
            if text := path.read_text().strip():
                return text
            path.unlink()  # a crash of the host left it empty
        fresh.write_text(secrets.token_hex(8) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
