"""A store on a file system of the test's own, and a layer in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# modules beside the tests are not importable under importlib mode
sys.path.insert(0, str(Path(__file__).parent))

from layers import SlowStore, make_layer

from dsec.environments import EnvironmentStore

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A big file and some small ones, of random bytes."""
    root = tmp_path / "tree"
    (root / "small").mkdir(parents=True)
    (root / "big").write_bytes(os.urandom(24 * MIB))
    for number in range(40):
        (root / f"small/{number}").write_bytes(os.urandom(20_000))
    return root


@pytest.fixture
def slow_store(state_run: Any, tree: Path, tmp_path: Path) -> Iterator[SlowStore]:
    """The store with the layer `base`, shown by a server that can be told to misbehave."""
    builder = EnvironmentStore(state_run.state / "builder", state_run.run / "builder", tmp_path / "store")
    make_layer(builder, "base", tree)
    store = SlowStore(tmp_path / "store", tmp_path / "seen", tmp_path / "reads")
    yield store
    store.close()
