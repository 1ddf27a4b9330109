"""The layers of the job: a base from Debian, the older release as a git repository, the harness, and the verifier's tests.

Only the base costs time. The others are a few files; they are built again where what they are made from has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .task import Task

__all__ = ["HARNESS", "LAYERS", "SUPERVISOR", "TESTS", "Layer", "recipe", "stage"]

_HERE = Path(__file__).parent
HARNESS = "/opt/harness/harness.py"
SUPERVISOR = "/opt/verifier/supervisor.py"
TESTS = "/opt/verifier/release"
_EPOCH = 1_750_000_000


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's name, kind and what fills its staging folder (None: built from the distribution)."""

    name: str
    kind: Literal["base", "workspace", "toolkit"]
    fill: Callable[[Path, Task, Path, Path], None] | None
    source: str = ""
    include: tuple[str, ...] = ()


def stage(layer: Layer, folder: Path, task: Task, old: Path, new: Path) -> None:
    """Fill `folder` with the layer's tree. `old` and `new` are the unpacked releases."""
    assert layer.fill is not None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layer.fill(folder, task, old, new)
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            os.utime(path, (_EPOCH, _EPOCH))


def recipe(task: Task) -> str:
    """A digest of all that the small layers are made from: built layers of the same recipe need not be built again."""
    digest = hashlib.sha256(f"{task.old}{task.new}{task.package}{task.tests}".encode())
    for path in (Path(__file__), *sorted((_HERE / "toolkit").glob("*.py")), *sorted((_HERE / "verifier").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _workspace(folder: Path, task: Task, old: Path, _new: Path) -> None:
    """The older release as a repository with one commit: no history, remote, tag or reflog leads to the fix."""
    root = folder / task.root.lstrip("/")
    shutil.copytree(old, root, ignore=shutil.ignore_patterns("*.egg-info", "PKG-INFO", "__pycache__"))
    date = f"@{_EPOCH} +0000"
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_DATE": date,
        "GIT_TEMPLATE_DIR": "",
    }
    identity = ["-c", "user.name=rollouts", "-c", "user.email=rollouts@localhost", "-c", "core.logAllRefUpdates=false"]
    for arguments in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "--all"],
        [*identity, "commit", "--quiet", "-m", task.old.folder],
    ):
        subprocess.run(["git", *arguments], cwd=root, env=environment, check=True, capture_output=True)


def _toolkit(folder: Path, _task: Task, _old: Path, _new: Path) -> None:
    _copy(_HERE / "toolkit" / "harness.py", folder / HARNESS.lstrip("/"))


def _verifier(folder: Path, task: Task, _old: Path, new: Path) -> None:
    """The newer release's tests, never its source."""
    for name in ("supervisor.py", "child.py"):
        _copy(_HERE / "verifier" / name, (folder / SUPERVISOR.lstrip("/")).with_name(name))
    shutil.copytree(new / task.tests, folder / TESTS.lstrip("/") / task.tests, ignore=shutil.ignore_patterns("__pycache__"))


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


LAYERS = (
    Layer("rollouts-base", "base", None, "debian:bookworm", ("python3", "git")),
    Layer("rollouts-workspace", "workspace", _workspace),
    Layer("rollouts-toolkit", "toolkit", _toolkit),
    Layer("rollouts-verifier", "toolkit", _verifier),
)
