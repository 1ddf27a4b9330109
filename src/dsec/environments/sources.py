"""What a layer may be built from: `SCHEME:ARGUMENT`, and how each scheme fills a tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.environments.archives import unpack_tar
from dsec.environments.debian import bootstrap_debian, check_packages, check_suite
from dsec.environments.git import export_commit
from dsec.environments.manifest import Configuration
from dsec.environments.oci import apply_image
from dsec.environments.streams import decompressed
from dsec.environments.tools import run_tool
from dsec.environments.tree import Attributes, RootedTree, refuse
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
    argument = source.argument
    match source.scheme:
        case "debian":
            check_suite(argument)
            check_packages(include)
            target = tree.make_root(destination)
            provenance = bootstrap_debian(argument, include, target, work)
            tree.keep_times(target)
            # the tool writes this machine's resolver and name there
            tree.add_file("etc/resolv.conf", [], Attributes(mode=0o644))
            tree.add_file("etc/hostname", [b"sandbox\n"], Attributes(mode=0o644))
            return Fetched(provenance=provenance)
        case "dir":
            _copy_folder(_existing(argument, folder=True), tree, destination)
            return Fetched()
        case "tar":
            return _fetch_tar(_existing(argument, folder=False), tree, destination, progress)
        case "sdist":
            return _fetch_tar(_existing(argument, folder=False), tree, destination, progress, rename=_WithoutTop(), own=(0, 0))
        case "oci":
            path, wanted = _at(argument)
            configuration, digest = apply_image(path, wanted, tree, destination, work=work, progress=progress)
            return Fetched(configuration, {"image": digest})
        case _:
            path, revision = _at(argument)
            return Fetched(provenance=export_commit(path, revision or "HEAD", tree, destination, progress))


def _at(argument: str) -> tuple[Path, str]:
    """`PATH` or `PATH@WHAT`; a path that exists with its `@` is a path."""
    if "@" in argument and not Path(argument).exists():
        path, _, what = argument.rpartition("@")
        if not what:
            raise InvalidArgument(f"source: nothing comes after '@' in {argument!r:.300}", field="source")
        return _existing(path), what
    return _existing(argument), ""


class _WithoutTop:
    """Takes the one top folder, which an sdist has, off each name."""

    def __init__(self) -> None:
        self._top: str | None = None

    def __call__(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if not parts:
            return ""
        if self._top is None:
            self._top = parts[0]
        if parts[0] != self._top:
            refuse(name, f"lies outside of the one top folder that an sdist has, {self._top!r:.100}")
        return "/".join(parts[1:])


def _fetch_tar(
    path: Path,
    tree: RootedTree,
    destination: str,
    progress: Progress,
    *,
    rename: Callable[[str], str] = str,
    own: tuple[int, int] | None = None,
) -> Fetched:
    tree.make_root(destination)
    with path.open("rb", buffering=0) as file, decompressed(file.fileno(), progress) as stream:
        digest = unpack_tar(stream, tree, destination, rename=rename, own=own)
    return Fetched(provenance={"tar_sha256": digest})


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
