"""Modules beside the tests are not importable under importlib mode, so their folder goes on the path; packs for all tests of a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "trees"))

from forest import Packs


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    """Three packs of 64 blocks."""
    return Packs(tmp_path_factory.mktemp("packs"))
