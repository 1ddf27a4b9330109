"""The checks of conftest.py catch what they are there for: each case runs a small test file under the real conftest, in its own pytest."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def run_pytest(folder: Path, source: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").symlink_to(PROJECT / "tests/conftest.py")
    (folder / "test_case.py").write_text("import asyncio, os, subprocess, threading, time\nimport pytest\n" + textwrap.dedent(source))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(PROJECT / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        *args,
        str(folder),
    ]
    env = os.environ | {"DSEC_TEST_LEAK_PATIENCE": "0.5"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=env)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_it():\n    os.open('/dev/null', os.O_RDONLY)", "-> /dev/null"),
        ("def test_it():\n    threading.Thread(target=time.sleep, args=(8,), name='left', daemon=True).start()", "thread: left"),
        ("def test_it():\n    subprocess.run('setsid sleep 30 & sleep 0.1', shell=True)", "sleep 30"),
        ("def test_it(state_run):\n    subprocess.run(['sh', '-c', 'setsid sh -c \"sleep 31; true\" &'])", "sleep 31"),
    ],
    ids=["fd", "thread", "orphan", "tree"],
)
def test_what_a_test_leaves_behind_fails_it(tmp_path: Path, source: str, expected: str) -> None:
    done = run_pytest(tmp_path, source)
    assert done.returncode == 1, done.stdout
    assert "left behind" in done.stdout
    assert expected in done.stdout


@pytest.mark.root
@pytest.mark.slow
def test_mounts_and_cgroups_of_an_instance_are_found_and_removed(tmp_path: Path) -> None:
    done = run_pytest(
        tmp_path,
        """
        import pathlib
        def test_it(state_run):
            subprocess.run(["mount", "-t", "tmpfs", "none", str(state_run.run)], check=True)
            parents = [p for p in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup") if os.path.exists(p + "/cgroup.procs")]
            os.makedirs(f"{parents[0]}/{state_run.cgroup}/sb-1")
            pathlib.Path("instance").write_text(f"{parents[0]}/{state_run.cgroup}\\n{state_run.run}")
        """,
    )
    group, run = (tmp_path / "instance").read_text().split("\n")
    assert f"mount: {run}" in done.stdout
    assert f"cgroup: {group}/sb-1" in done.stdout
    assert not Path(group).exists()
    assert run not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.slow
def test_code_of_ours_that_blocks_the_loop_fails_the_test(tmp_path: Path) -> None:
    source = """
    from dsec.testing import leaks
    @pytest.mark.parametrize("blocking", [True, False])
    async def test_it(blocking, monkeypatch):
        if blocking:
            monkeypatch.setattr(leaks, "_descriptors", lambda: time.sleep(1.0) or [])
            leaks.take()
        else:
            await asyncio.to_thread(time.sleep, 1.0)
    """
    done = run_pytest(tmp_path, source)
    assert "src/dsec/testing/leaks.py" in done.stdout
    assert "held the event loop" in done.stdout
    assert "2 passed, 1 error" in done.stdout


@pytest.mark.slow
def test_exit_code_and_signals_pass_the_reaper(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, "def test_it():\n    subprocess.run('sh -c \"sleep 0.05 &\"', shell=True)").returncode == 0
    (tmp_path / "conftest.py").unlink()
    assert run_pytest(tmp_path, "def test_it():\n    os.kill(os.getpid(), 9)").returncode == 137
