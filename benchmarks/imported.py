"""The corpus in a store of ours, imported once and kept in the cache."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.corpus import Corpus
from dsec.environments import EnvironmentStore, build
from dsec.environments.manifest import Identity
from libdsec.errors import DSecError

__all__ = ["imported_store"]


def _format() -> str:
    return next(str(field.default) for field in msgspec.structs.fields(Identity) if field.name == "format")


def imported_store(corpus: Corpus) -> Path:
    """A store that has each image as an environment of the image's name. One of another format is not taken for it."""
    root = Path(corpus.folder) / f"store-{_format()}"
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as work:
        environments = EnvironmentStore(Path(work) / "state", Path(work) / "run", root)
        for image in corpus.images:
            try:
                environments.show(image.name)
            except DSecError:
                print(f"importing {image.name}, {image.tar_bytes / 1e6:.0f} MB, once", file=sys.stderr, flush=True)
                build(environments, image.name, source=f"oci:{corpus.layout}@{image.name}")
    return root
