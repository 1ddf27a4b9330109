"""What a layer may be built from: `SCHEME:ARGUMENT`, and how each scheme gives a tree."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.environments.erofs import holds_xattr
from dsec.environments.manifest import Configuration
from dsec.environments.sources.archives import read_tar
from dsec.environments.sources.builder import TreeBuilder
from dsec.environments.sources.debian import bootstrapped, check_packages, check_suite, choose_mirrors, configured_mirrors
from dsec.environments.sources.furnishing import put_file
from dsec.environments.sources.git import export_commit
from dsec.environments.sources.oci import Progress, read_image
from dsec.environments.sources.refusals import refuse
from dsec.environments.sources.registry import RegistryOptions, pulled
from dsec.environments.sources.streams import Extent, decompressed, streamed
from dsec.environments.sources.workbench import Workbench
from dsec.environments.tools import tool_version
from dsec.environments.trees import OPAQUE, Node, Segment, keep_all, walk
from libdsec.errors import DSecError, InvalidArgument, NotFound

__all__ = ["SCHEMES", "Fetched", "Source", "fetch_source", "parse_source"]

SCHEMES: Final = ("debian", "dir", "tar", "oci", "docker", "git", "sdist")


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed source. `text` is for people: as given, but for what is no text."""

    text: str
    scheme: str
    argument: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """A tree, or several from the bottom of which each is a layer over those before it, and what the source said beside its files."""

    trees: list[Node]
    configuration: Configuration = field(default_factory=Configuration)
    provenance: dict[str, str] = field(default_factory=dict)


def parse_source(text: str) -> Source:
    """Read `SCHEME:ARGUMENT`; InvalidArgument naming `source` if it is none."""
    scheme, colon, argument = text.partition(":")
    if not colon or scheme not in SCHEMES or not argument or "\0" in argument:
        raise InvalidArgument(f"source: {text!r:.300} is none of {', '.join(f'{name}:...' for name in SCHEMES)}", field="source")
    return Source(text.encode(errors="backslashreplace").decode(), scheme, argument)


def fetch_source(source: Source, bench: Workbench, *, include: Sequence[str], registry: RegistryOptions, progress: Progress) -> Fetched:
    """Read the source, contents into the bench's pack."""
    argument = source.argument

    def plain(done: int, total: int) -> None:
        progress(done, total, 0, 0)

    match source.scheme:
        case "debian":
            return _debian(argument, include, bench, plain)
        case "dir":
            return _folder(_existing(argument, folder=True), bench, plain)
        case "tar":
            return _tar(_existing(argument, folder=False), bench, plain)
        case "sdist":
            return _tar(_existing(argument, folder=False), bench, plain, rename=_WithoutTop(), own=(0, 0))
        case "oci":
            path, wanted = _at(argument)
            image = read_image(path, wanted, bench, progress)
            return Fetched(image.trees, image.configuration, image.provenance)
        case "docker":
            with pulled(argument, registry, bench, plain) as (path, provenance):
                image = read_image(path, "", bench, progress)
            return Fetched(image.trees, image.configuration, image.provenance | provenance)
        case _:
            path, revision = _at(argument)
            builder = TreeBuilder()
            provenance = export_commit(path, revision or "HEAD", builder, bench.add, bench.budget, lambda done: plain(done, 0))
            return Fetched([builder.finish()], provenance=provenance | {"tool": tool_version("git")})


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
        self._top: bytes | None = None

    def __call__(self, name: bytes) -> bytes:
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if not parts:
            return b""
        if self._top is None:
            self._top = parts[0]
        if parts[0] != self._top:
            refuse(name, f"lies outside of the one top folder that an sdist has, {os.fsdecode(self._top)!r:.100}")
        return b"/".join(parts[1:])


def _tar(
    path: Path,
    bench: Workbench,
    progress: Callable[[int, int], None],
    *,
    rename: Callable[[bytes], bytes] = bytes,
    own: tuple[int, int] | None = None,
) -> Fetched:
    builder = TreeBuilder()
    with path.open("rb", buffering=0) as file, decompressed(Extent(file.fileno()), progress) as stream:
        digest = read_tar(stream, builder, bench.add, bench.budget, rename=rename, own=own)
    return Fetched([builder.finish()], provenance={"tar_sha256": digest})


def _debian(suite: str, packages: Sequence[str], bench: Workbench, progress: Callable[[int, int], None]) -> Fetched:
    check_suite(suite)
    check_packages(packages)
    mirrors = choose_mirrors(configured_mirrors(), suite)
    builder = TreeBuilder()
    with bootstrapped(mirrors, suite, packages, bench.scratch) as output:
        with streamed(output, lambda done: progress(done, 0), output.kill) as stream:
            digest = read_tar(stream, builder, bench.add, bench.budget)
            output.finish()
    trees = [builder.finish()]
    # the tool writes this machine's resolver and name there
    put_file(trees, "etc/resolv.conf", b"")
    put_file(trees, "etc/hostname", b"sandbox\n")
    return Fetched(
        trees,
        provenance={
            "suite": suite,
            "packages": " ".join(packages),
            "mirrors": "; ".join(mirror.line for mirror in mirrors),
            "tar_sha256": digest,
            "tool": tool_version("mmdebstrap"),
        },
    )


def _folder(path: Path, bench: Workbench, progress: Callable[[int, int], None]) -> Fetched:
    """The folder's whole content with all attributes, hard links and holes; not what is mounted in it."""
    done = 0

    def add(pieces: Iterable[bytes | int], size: int | None = None, /) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        nonlocal done
        found = bench.add(pieces, size)
        done += found[0]
        progress(done, 0)
        return found

    try:
        tree = walk(path, add, keep_xattr=lambda name: name == OPAQUE or (keep_all(name) and holds_xattr(name)))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # that is where it is stored
            raise
        raise DSecError(f"source: {error.filename or path}: {error.strerror}", field="source", cause="os-error", ran="ran") from error
    return Fetched([tree])


def _existing(argument: str, *, folder: bool | None = None) -> Path:
    path = Path(argument)
    if not path.exists():
        raise NotFound(f"source: {argument} does not exist", field="source")
    if folder is True and not path.is_dir():
        raise InvalidArgument(f"source: {argument} is no folder", field="source")
    if folder is False and not path.is_file():
        raise InvalidArgument(f"source: {argument} is no file", field="source")
    return Path(os.path.realpath(path))
