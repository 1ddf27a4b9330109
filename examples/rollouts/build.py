"""Builds the job's layers, as a program of its own so that a Ctrl-C can end it.

`python -m examples.rollouts.build STATE RUN OLD NEW NAME...` prints one line for each phase. OLD and NEW are the unpacked releases.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dsec.environments import BuildProgress, EnvironmentStore, build

from .layers import LAYERS, Layer, stage
from .task import CACHETOOLS


def main(arguments: list[str]) -> None:
    """Build the layers named, in order."""
    state, run, old, new = map(Path, arguments[:4])
    store = EnvironmentStore(state, run)
    for layer in LAYERS:
        if layer.name in arguments[4:]:
            with tempfile.TemporaryDirectory(dir=state, prefix="stage-") as folder:
                _build(store, layer, Path(folder) / "tree", old, new)


def _build(store: EnvironmentStore, layer: Layer, folder: Path, old: Path, new: Path) -> None:
    phase = ""

    def tell(progress: BuildProgress) -> None:
        nonlocal phase
        if progress.phase != phase:
            phase = progress.phase
            print(f"{layer.name}: {phase}", flush=True)

    source = layer.source
    if layer.fill is not None:
        stage(layer, folder, CACHETOOLS, old, new)
        source = f"dir:{folder}"
    build(store, layer.name, source=source, kind=layer.kind, include=layer.include, dest="/", progress=tell)


if __name__ == "__main__":
    main(sys.argv[1:])
