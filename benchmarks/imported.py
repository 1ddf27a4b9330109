"""The corpus in a store of ours, imported once and kept in the cache."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.corpus import Corpus
from benchmarks.root import store_folder
from dsec.environments import EnvironmentStore, build
from libdsec.errors import DSecError

__all__ = ["imported_store"]


def imported_store(corpus: Corpus) -> Path:
    """A store that has each image as an environment of the image's name. One of another format is not taken for it."""
    root = store_folder(Path(corpus.folder))
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as work:
        environments = EnvironmentStore(Path(work) / "state", Path(work) / "run", root)
        for image in corpus.images:
            try:
                environments.show(image.name)
            except DSecError:
                print(f"importing {image.name}, {image.tar_bytes / 1e6:.0f} MB, once", file=sys.stderr, flush=True)
                build(environments, image.name, source=f"oci:{corpus.layout}@{image.name}")
    return root
