"""Whether a git repository is where it is said to be: one from elsewhere can name, as its own, parts of another on this machine.

A `.git` may be a file that names a folder, `commondir` in it may name another, and links may lead anywhere. What a worktree or a submodule
has of this is allowed, as what they name, names them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dsec.environments.tools import run_tool
from libdsec.errors import DSecError, InvalidArgument

__all__ = ["check_place"]

_TEXT_LIMIT: Final = 8192


def check_place(repository: Path) -> None:
    """InvalidArgument if what `repository`, or the nearest folder above it that is one, has of git lies elsewhere.

    Alternates are followed: who names them must know the ids of what is in there.
    """
    top = _top(Path(os.path.realpath(repository)))
    if top is None:
        return  # git says so better
    dot = top / ".git"
    if not os.path.lexists(dot):
        _check_links(top)
        return
    if not dot.is_symlink() and dot.is_dir():
        if os.path.lexists(dot / "commondir"):
            raise _elsewhere(dot, "by its commondir")
        _check_links(dot)
        return
    folder = Path(os.path.realpath(top / _text(dot).removeprefix("gitdir:").strip()))
    common = Path(os.path.realpath(folder / (_text(folder / "commondir").strip() or ".")))
    if dot.is_symlink() or not (_names_worktree(folder, common, dot) or _names_submodule(folder, top)):
        raise _elsewhere(dot, f"in {folder}, which knows nothing of it")
    _check_links(common)


def _top(path: Path) -> Path | None:
    for folder in (path, *path.parents):
        if os.path.lexists(folder / ".git") or ((folder / "HEAD").is_file() and (folder / "objects").is_dir()):
            return folder
    return None


def _names_worktree(folder: Path, common: Path, dot: Path) -> bool:
    back = _text(folder / "gitdir").strip()
    return bool(back) and os.path.realpath(folder / back) == str(dot) and folder.parent == common / "worktrees"


def _names_submodule(folder: Path, top: Path) -> bool:
    if os.path.lexists(folder / "commondir"):
        return False
    try:
        said = run_tool(["git", "config", "--no-includes", "--file", str(folder / "config"), "core.worktree"])
    except DSecError:
        return False
    return os.path.realpath(folder / os.fsdecode(said).rstrip("\n")) == str(top)


def _check_links(start: Path) -> None:
    """Hooks may lie anywhere: they are not run, and hold no files."""
    for above, folders, files in os.walk(start):
        if above == str(start) and "hooks" in folders:
            folders.remove("hooks")
        for name in (*folders, *files):
            path = Path(above, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(start):
                raise _elsewhere(path, f"in {os.path.realpath(path)}")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return os.fsdecode(file.read(_TEXT_LIMIT))
    except OSError:
        return ""


def _elsewhere(path: Path, where: str) -> InvalidArgument:
    return InvalidArgument(f"source: {path} lies elsewhere, {where}: give the repository that it belongs to", field="source")
