"""The root that everything measured runs on: one Debian environment, built once through `dsec.environments`, for ours and for the peers.

Peers that take a folder get the very EROFS mount that our sandboxes have below them; those that take an archive get what it was built from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.downloads import SUITE, debian_root
from dsec.environments import EnvironmentStore, build
from dsec.environments.manifest import Identity
from libdsec.errors import DSecError

__all__ = ["CACHE", "Root", "shared_root", "store_folder"]

CACHE = Path(__file__).resolve().parent.parent / "build" / "bench-cache"
NAME = "bench"
SOURCE = f"debian:{SUITE}"
PACKAGES = ["python3"]


def store_folder(below: Path) -> Path:
    """The store in a cache folder: another for each format of layers, as none can be read as another."""
    form = next(field.default for field in msgspec.structs.fields(Identity) if field.name == "format")
    return below / f"store-{form}"


@dataclass(frozen=True, slots=True)
class Root:
    """`environment` in `store` is what our sandboxes ask for, `tree` its mount, `tar` the same as an archive."""

    environment: str
    store: Path
    tree: Path
    tar: Path

    def to_json(self) -> dict[str, object]:
        return {"source": SOURCE, "packages": PACKAGES, "environment": self.environment, "tar_mb": round(self.tar.stat().st_size / 1e6, 1)}


@contextlib.contextmanager
def shared_root(folder: Path, *, cache: Path = CACHE) -> Iterator[Root]:
    """Builds what the cache lacks; mounts below `folder` and unmounts at the end."""
    store = store_folder(cache)
    environments = EnvironmentStore(folder / "state", folder / "run", store)
    tar = debian_root("small", PACKAGES, cache)
    try:
        digest = environments.show(NAME).digest
    except DSecError:
        print(f"building the environment {NAME!r} from {SOURCE}, once", file=sys.stderr)
        digest = build(environments, NAME, source=f"tar:{tar}").digest
    owner = "benchmark"
    try:
        yield Root(f"{NAME}@{digest}", store, Path(environments.acquire([digest], owner)[0]), tar)
    finally:
        environments.release(owner)
        environments.sweep_mounts(())
