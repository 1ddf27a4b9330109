"""The check at the end finds what a job could leave, each kind by itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.resources.plan import instance_name
from dsec.testing import leaks
from examples.rollouts.daemon import make_run_folder, remove_run_folder
from examples.rollouts.leftovers import Leftovers, look, settle


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="rollouts-left-") as parent:
        state = Path(parent, "state")
        state.mkdir()
        yield state, Path(parent, "run")


def test_nothing_is_found_where_nothing_is(folders: tuple[Path, Path]) -> None:
    assert settle(*folders) == Leftovers()


def test_a_run_folder_is_found(folders: tuple[Path, Path]) -> None:
    state, run = folders
    run.mkdir()
    assert look(state, run).left == [f"file: {run}"]


def test_a_process_of_the_server_is_found_by_its_environment(folders: tuple[Path, Path]) -> None:
    state, run = folders
    process = subprocess.Popen(["sleep", "321"], env={"PATH": os.environ["PATH"], "DSEC_RUN": str(run)})
    try:
        assert look(state, run).left == [f"process: {process.pid} sleep 321"]
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
        assert look(state, run).left == [f"mount: {run}/layers", f"file: {run}"]
    finally:
        subprocess.run(["umount", str(run / "layers")], check=True)
    remove_run_folder(state, run)
    assert look(state, run).left == []


@pytest.mark.root
@pytest.mark.slow
def test_a_disk_image_that_another_program_holds_is_told_apart(folders: tuple[Path, Path]) -> None:
    state, run = folders
    image, point = state / "disk.img", state / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    holder = None
    try:
        assert [line.partition(":")[0] for line in look(state, run).left] == ["mount", "loop device"]
        holder = subprocess.Popen(["unshare", "--mount", "sleep", "321"])
        deadline = time.monotonic() + 10
        while Path(f"/proc/{holder.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
            time.sleep(0.01)
        subprocess.run(["umount", str(point)], check=True)
        found = look(state, run)
        assert found.left == []
        (held,) = found.held
        assert held.startswith("loop device: ")
        assert f"held by process {holder.pid} " in held
    finally:
        if holder is not None:
            holder.kill()
            holder.wait()
        subprocess.run(["umount", "-q", str(point)], check=False)
    assert settle(state, run) == Leftovers(left=[], held=[])


@pytest.mark.root
def test_a_cgroup_is_found(folders: tuple[Path, Path]) -> None:
    state, run = folders
    parent = next(path for path in leaks.cgroup_hierarchies() if os.access(path / "cgroup.procs", os.W_OK))
    group = parent / instance_name(run)
    group.mkdir()
    try:
        assert look(state, run).left == [f"cgroup: {group}"]
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
