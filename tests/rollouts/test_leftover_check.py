"""The check at the end finds what a job could leave, each kind by itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.resources.plan import instance_name
from dsec.testing import leaks
from examples.rollouts.daemon import make_run_folder, remove_run_folder
from examples.rollouts.leftovers import left, settle


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="rollouts-left-") as parent:
        state = Path(parent, "state")
        state.mkdir()
        yield state, Path(parent, "run")


def test_nothing_is_found_where_nothing_is(folders: tuple[Path, Path]) -> None:
    assert settle(*folders) == []


def test_a_run_folder_is_found(folders: tuple[Path, Path]) -> None:
    state, run = folders
    run.mkdir()
    assert left(state, run) == [f"file: {run}"]


def test_a_process_of_the_server_is_found_by_its_environment(folders: tuple[Path, Path]) -> None:
    state, run = folders
    process = subprocess.Popen(["sleep", "321"], env={"PATH": os.environ["PATH"], "DSEC_RUN": str(run)})
    try:
        assert left(state, run) == [f"process: {process.pid} sleep 321"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.root
def test_a_mount_is_found_and_keeps_the_run_folder_for_the_next_job(folders: tuple[Path, Path]) -> None:
    state, run = folders
    (run / "layers").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(run / "layers")], check=True)
    try:
        remove_run_folder(state, run)
        assert left(state, run) == [f"mount: {run}/layers", f"file: {run}"]
    finally:
        subprocess.run(["umount", str(run / "layers")], check=True)
    remove_run_folder(state, run)
    assert left(state, run) == []


@pytest.mark.root
def test_a_cgroup_is_found(folders: tuple[Path, Path]) -> None:
    state, run = folders
    parent = next(path for path in leaks.cgroup_hierarchies() if os.access(path / "cgroup.procs", os.W_OK))
    group = parent / instance_name(run)
    group.mkdir()
    try:
        assert left(state, run) == [f"cgroup: {group}"]
    finally:
        group.rmdir()


async def test_a_fresh_run_folder_is_made_noted_and_removed(folders: tuple[Path, Path]) -> None:
    state, _ = folders
    run = await make_run_folder(state)
    assert run.is_dir()
    assert (state / "run-folder").read_text() == str(run)
    remove_run_folder(state, run)
    assert not run.exists()
    assert not (state / "run-folder").exists()
