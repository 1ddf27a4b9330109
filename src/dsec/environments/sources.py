"""What a layer may be built from: `SCHEME:ARGUMENT`, and how each scheme fills a tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.environments.debian import bootstrap_debian, check_packages, check_suite
from dsec.environments.manifest import Configuration
from dsec.environments.tools import run_tool
from dsec.environments.tree import RootedTree
from libdsec.errors import InvalidArgument, NotFound

__all__ = ["SCHEMES", "Fetched", "Source", "fetch_source", "parse_source"]

SCHEMES: Final = ("debian", "dir", "tar", "oci", "git", "sdist")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed source. `text` is as given."""

    text: str
    scheme: str
    argument: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the source said beside its files."""

    configuration: Configuration = field(default_factory=Configuration)
    provenance: dict[str, str] = field(default_factory=dict)


def parse_source(text: str) -> Source:
    """Read `SCHEME:ARGUMENT`; InvalidArgument naming `source` if it is none."""
    scheme, colon, argument = text.partition(":")
    if not colon or scheme not in SCHEMES or not argument or "\0" in argument:
        raise InvalidArgument(f"source: {text!r:.300} is none of {', '.join(f'{name}:...' for name in SCHEMES)}", field="source")
    return Source(text, scheme, argument)


def fetch_source(source: Source, tree: RootedTree, destination: str, *, work: Path, include: Sequence[str], progress: Progress) -> Fetched:
    """Fill `tree` below `destination`. `work` is a folder for what is only needed meanwhile."""
    match source.scheme:
        case "debian":
            check_suite(source.argument)
            check_packages(include)
            return Fetched(provenance=bootstrap_debian(source.argument, include, tree.make_root(destination), work))
        case _:
            _copy_folder(_existing(source.argument, folder=True), tree, destination)
            return Fetched()


def _existing(argument: str, *, folder: bool | None = None) -> Path:
    path = Path(argument)
    if not path.exists():
        raise NotFound(f"source: {argument} does not exist", field="source")
    if folder is True and not path.is_dir():
        raise InvalidArgument(f"source: {argument} is no folder", field="source")
    if folder is False and not path.is_file():
        raise InvalidArgument(f"source: {argument} is no file", field="source")
    return Path(os.path.realpath(path))


def _copy_folder(origin: Path, tree: RootedTree, destination: str) -> None:
    """The folder's whole content with all attributes, hard links and holes; not what is mounted in it."""
    target = tree.make_root(destination)
    run_tool(["cp", "--archive", "--one-file-system", "--reflink=auto", "--", f"{origin}/.", str(target)])
    tree.keep_times(target)
