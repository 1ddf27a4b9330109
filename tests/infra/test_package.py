"""The package as a user gets it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dsec
from dsec._native import NativeBinaryMissing, native_binary

PROJECT = Path(__file__).resolve().parents[2]


def test_the_version_is_one() -> None:
    assert tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"] == dsec.__version__


def test_a_missing_binary_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSEC_NATIVE", str(tmp_path / "none"))
    with pytest.raises(NativeBinaryMissing, match="DSEC_NATIVE"):
        native_binary()
    (tmp_path / "none").touch(mode=0o600)
    with pytest.raises(NativeBinaryMissing, match="chmod"):
        native_binary()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of what a source distribution has, without anything built."""
    copy = tmp_path_factory.mktemp("sources") / "dsec"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, copy)
    for name in ("src", "native"):
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "dsec-native"))
    return copy


def build_wheel(sources: Path, target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # The build backend is there already, so nothing is fetched.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(target), str(sources)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | env, timeout=100)


@pytest.mark.slow
def test_the_wheel_brings_a_static_binary_and_the_command_works(sources: Path, tmp_path: Path) -> None:
    built = build_wheel(sources, tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "py3-none-linux" in wheel.name
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
        mode = archive.getinfo("dsec/_native/dsec-native").external_attr >> 16
    assert mode & 0o111
    binary = target / "dsec/_native/dsec-native"
    binary.chmod(0o755)
    assert binary.read_bytes()[:4] == b"\x7fELF"
    assert "INTERP" not in subprocess.run(["readelf", "-l", str(binary)], capture_output=True, text=True, check=True).stdout
    env = os.environ | {"PYTHONPATH": str(target)}
    run = subprocess.run(
        [sys.executable, "-m", "dsec.cli", "doctor", "--json"], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    native = next(finding for finding in json.loads(run.stdout)["findings"] if finding["mechanism"] == "native binary")
    assert native["present"]
    assert str(binary) in native["detail"]


@pytest.mark.slow
def test_without_a_compiler_the_build_says_what_to_install(sources: Path, tmp_path: Path) -> None:
    built = build_wheel(sources, tmp_path, CC="no-such-compiler")
    assert built.returncode != 0
    assert "no-such-compiler" in built.stdout + built.stderr
    assert "apt-get install build-essential" in built.stdout + built.stderr
