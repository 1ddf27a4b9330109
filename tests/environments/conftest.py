"""Stores with folders of their own, and trees with everything in them that a file system can hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.environments import EnvironmentStore, ScratchStore

# modules beside the tests are not importable under importlib mode
sys.path.insert(0, str(Path(__file__).parent))

from trees import fill


@pytest.fixture
def store(state_run: Any) -> Iterator[EnvironmentStore]:
    """An empty store; what is mounted is unmounted at the end."""
    environments = EnvironmentStore(state_run.state, state_run.run)
    environments.layers.prepare()
    yield environments
    environments.sweep_mounts([])


@pytest.fixture
def scratch(state_run: Any) -> Iterator[ScratchStore]:
    """A scratch store in an image of 512 MiB."""
    scratch = ScratchStore(state_run.state, state_run.run, size_bytes=512 << 20)
    scratch.open()
    yield scratch
    scratch.close(unmount=True)


@pytest.fixture
def full_tree(tmp_path: Path) -> Path:
    """A tree as `fill` makes it."""
    fill(tmp_path / "tree")
    return tmp_path / "tree"
