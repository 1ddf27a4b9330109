"""Pinned archives: only the pinned content is taken, and only below its folder."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from examples.rollouts.releases import ReleaseError, fetch, unpack
from examples.rollouts.task import CACHETOOLS, Release


def _archive(path: Path, names: list[str]) -> Release:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    return Release("sums", "1", hashlib.sha256(path.read_bytes()).hexdigest())


async def test_an_archive_that_is_there_is_not_downloaded_again(tmp_path: Path) -> None:
    release = _archive(tmp_path / "sums-1.tar.gz", ["sums-1/a.py"])
    assert await fetch(release, tmp_path) == tmp_path / "sums-1.tar.gz"


def test_unpacking_replaces_what_was_there(tmp_path: Path) -> None:
    release = _archive(tmp_path / "sums-1.tar.gz", ["sums-1/a.py"])
    (tmp_path / "out" / "sums-1").mkdir(parents=True)
    (tmp_path / "out" / "sums-1" / "stale.py").touch()
    root = unpack(tmp_path / "sums-1.tar.gz", release, tmp_path / "out")
    assert [path.name for path in root.iterdir()] == ["a.py"]


def test_an_archive_that_leads_outside_is_refused(tmp_path: Path) -> None:
    release = _archive(tmp_path / "sums-1.tar.gz", ["sums-1/../../outside.py"])
    with pytest.raises(ReleaseError, match=r"outside\.py"):
        unpack(tmp_path / "sums-1.tar.gz", release, tmp_path / "deep" / "out")
    assert not (tmp_path / "outside.py").exists()


@pytest.mark.slow
@pytest.mark.network
async def test_another_content_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    release = Release(CACHETOOLS.old.project, CACHETOOLS.old.version, "0" * 64)
    with pytest.raises(ReleaseError, match="pip failed"):
        await fetch(release, tmp_path)
    assert os.listdir(tmp_path) == []
