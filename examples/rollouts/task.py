"""The task that the rollouts work on: two consecutive releases of cachetools, and what a person would have written about the bug.

cachetools 7.1.5 fixes two faults of 7.1.4: `TLRUCache` kept the old value when a key was overwritten by a value that is expired at once,
and a negative item size was accepted and drove `currsize` below zero. Its source archive brings the tests for both. It needs the standard
library alone.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CACHETOOLS", "Release", "Task"]


@dataclass(frozen=True, slots=True)
class Release:
    """A pinned source release. `sha256` is of the archive; another content is refused."""

    project: str
    version: str
    sha256: str

    @property
    def folder(self) -> str:
        """Name of the archive's top folder."""
        return f"{self.project}-{self.version}"


@dataclass(frozen=True, slots=True)
class Task:
    """A bug with its fix. Relative to the project's root: `package`, the source folder that an agent may change, and `tests`."""

    name: str
    old: Release
    new: Release
    package: str
    tests: str
    statement: str

    @property
    def root(self) -> str:
        """Where the project lies in a sandbox."""
        return f"/workspace/{self.old.project}"

    @property
    def package_path(self) -> str:
        """The source folder in a sandbox."""
        return f"{self.root}/{self.package}"

    @property
    def import_root(self) -> str:
        """What goes on `sys.path` for the package to be importable."""
        return self.package_path.rpartition("/")[0]


CACHETOOLS = Task(
    name="cachetools-stale-overwrite",
    old=Release("cachetools", "7.1.4", "437f55a4e0c1b01a4f3077cc470e6991d47430970e36fbcb77e2be0df4fc1cd6"),
    new=Release("cachetools", "7.1.5", "0def7134eba79e59448edaf5d2e3cc8e49978ab2fd56189c1efd19856b134ab5"),
    package="src/cachetools",
    tests="tests",
    statement="""\
The project in /workspace/cachetools has two bugs.

1. Overwriting an existing key of a TLRUCache with a value whose time-to-use says that it is expired already is silently ignored: the
previous value stays in the cache and is still returned. Afterwards the key must not be in the cache, and len() and currsize must say so.
2. If getsizeof() returns a negative number for a value, every cache accepts it and currsize becomes negative. Assigning such an item must
raise ValueError and leave the cache as it was.

Fix both in src/cachetools. The tests run with: cd /workspace/cachetools && PYTHONPATH=src python3 -m unittest
Hidden tests check the fix and that everything else still works. Changes outside src/cachetools are thrown away.
""",
)
