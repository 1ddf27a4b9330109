"""Building a layer: the source becomes a tree while it is read, the tree an image, the image a published layer with a name."""

from __future__ import annotations

import contextlib
import errno
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from dsec.environments.environment import EnvironmentStore
from dsec.environments.manifest import KINDS, Configuration, Kind
from dsec.environments.names import DEFAULT_TAG, Reference, check_name, check_tag
from dsec.environments.packs import ContentsLost, KnownContents
from dsec.environments.publish import Draft, draft_tree, publish_drafts
from dsec.environments.sources import Fetched, RegistryOptions, Source, Workbench, data_bytes, fetch_source, parse_source
from dsec.environments.sources.furnishing import furnish_base, nest
from dsec.environments.trees import Node, collapse
from libdsec.errors import DSecError, InvalidArgument, QuotaExceeded
from libdsec.schema import EnvironmentInfo

__all__ = ["COLLAPSE_BELOW", "DEFAULT_DESTINATION", "BuildProgress", "build"]

DEFAULT_DESTINATION = "/workspace"

COLLAPSE_BELOW: Final = 3_000_000_000
"""Bytes of contents up to which consecutive layers of an image become one: a look-up in an overlay costs by its layers."""

_ATTEMPTS: Final = 4
_BUILT: Final[tuple[Kind, ...]] = tuple(kind for kind in KINDS if kind != "snapshot")


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """What a build does now: fetch, merge, publish. `done` and `total` are in bytes where they are known, else 0.

    Of an image, `layer` is the number of the one that is read, from 1, and `layers` how many there are; else both are 0.
    """

    phase: str
    done: int = 0
    total: int = 0
    layer: int = 0
    layers: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    reference: Reference
    source: Source
    kind: Kind
    destination: str
    include: Sequence[str]
    registry: RegistryOptions
    collapse_below: int
    command: str = field(default="")


def build(
    store: EnvironmentStore,
    name: str,
    *,
    source: str,
    kind: Kind | None = None,
    include: Sequence[str] = (),
    tag: str = DEFAULT_TAG,
    dest: str | None = None,
    collapse_below: int = COLLAPSE_BELOW,
    authfile: Path | None = None,
    tls_verify: bool = True,
    command: str = "",
    progress: Callable[[BuildProgress], None] | None = None,
) -> EnvironmentInfo:
    """Build `source` and let `name:tag` mean the layer. Blocks for as long as it takes: run it in a thread.

    `source` is `debian:SUITE` (with the packages `include`), `dir:PATH`, `tar:PATH`, `oci:PATH[@TAG]` (layout or docker archive),
    `docker://HOST/NAME` (through skopeo, with the credentials in `authfile`), or for a workspace `git:PATH[@REF]` and `sdist:PATH`. `kind`
    defaults to base, for git and sdist to workspace. `dest` is the folder in the sandbox that the tree lies in: for a base `/`, for others
    `/workspace` unless given. `command` is noted as what was asked for.

    The folders above `dest` become 0755 and root's in a sandbox, whatever the layers below have, but for the standard ones (/tmp, /root and
    their like), which stay as systems have them.

    Layers of an image are kept for other images, and become one layer of the environment up to `collapse_below` bytes of contents; what is
    more becomes a second one over it, and so on. With 0 each stays a layer.

    Raises InvalidArgument naming the field; QuotaExceeded(cause="disk") on a full disk; DSecError(cause="tool-failed") with what a tool
    said. On any failure, a kill included, no name is changed; layers of an image that were read stay known until they are collected as
    garbage, and what is left in temporary folders goes with the next build or sweep.
    """
    request = _checked(name, source, kind, include, tag, dest, RegistryOptions(authfile, tls_verify), collapse_below, command)
    tell = progress if progress is not None else lambda _: None
    store.layers.prepare()
    store.sweep_builds()
    try:
        for attempt in range(_ATTEMPTS):
            try:
                return _build(store, request, tell)
            except (ValueError, TypeError) as error:  # what a stranger's documents say has got further than it should
                raise InvalidArgument(f"source: no layer can be made of it: {error!s:.500}", field="source", cause="archive") from error
            except ContentsLost as error:  # a collection of garbage took what this build referred to: it is stored anew
                if attempt == _ATTEMPTS - 1:
                    raise DSecError(
                        f"contents of {name} vanished from the store again and again: {error}", cause="store", ran="ran"
                    ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuotaExceeded(f"the disk is full while building {name}: {error}", cause="disk", ran="ran") from error
        raise
    raise AssertionError("unreachable")


def _checked(
    name: str,
    source: str,
    kind: Kind | None,
    include: Sequence[str],
    tag: str,
    dest: str | None,
    registry: RegistryOptions,
    collapse_below: int,
    command: str,
) -> _Request:
    reference = Reference(check_name(name), tag=check_tag(tag))
    parsed = parse_source(source)
    if kind is None:
        kind = "workspace" if parsed.scheme in ("git", "sdist") else "base"
    if kind not in _BUILT:
        raise InvalidArgument(f"kind: {kind!r} is none of {', '.join(_BUILT)}", field="kind")
    if kind == "base" and parsed.scheme in ("git", "sdist"):
        raise InvalidArgument(f"kind: {parsed.scheme} gives a workspace or toolkit, not a base", field="kind")
    if kind != "base" and parsed.scheme == "debian":
        raise InvalidArgument("kind: debian gives a base", field="kind")
    if include and parsed.scheme != "debian":
        raise InvalidArgument(f"include: only debian takes packages, not {parsed.scheme}", field="include")
    if collapse_below < 0:
        raise InvalidArgument(f"collapse_below: {collapse_below} bytes are none", field="collapse_below")
    image = parsed.scheme in ("oci", "docker")
    destination = dest if dest is not None else "/" if kind == "base" or image else DEFAULT_DESTINATION
    if not destination.startswith("/") or "\0" in destination or not _is_text(destination) or ".." in destination.split("/"):
        raise InvalidArgument(f"dest: {destination!r} is no absolute path without '..'", field="dest")
    destination = "/" + "/".join(part for part in destination.split("/") if part not in ("", "."))
    if kind == "base" and destination != "/":
        raise InvalidArgument("dest: a base lies in /", field="dest")
    return _Request(reference, parsed, kind, destination, tuple(include), registry, collapse_below, command)


def _is_text(text: str) -> bool:
    """Whether it is UTF-8, as all is that manifests hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _build(store: EnvironmentStore, request: _Request, tell: Callable[[BuildProgress], None]) -> EnvironmentInfo:
    layers = store.layers
    with (
        store.staging.lease() as scratch,
        layers.building.lease() as folder,
        KnownContents(store.state / "contents.db", layers.packs.folder) as known,
    ):
        known.refresh()
        bench = Workbench(layers, folder, scratch, known, source=request.source.text)
        try:
            tell(BuildProgress("fetch"))
            fetched = fetch_source(
                request.source,
                bench,
                include=request.include,
                registry=request.registry,
                progress=lambda done, total, layer, count: tell(BuildProgress("fetch", done, total, layer, count)),
            )
            tell(BuildProgress("merge"))
            trees = fetched.trees or [nest(Node(0o40755, children={}), "/")]
            if request.kind == "base":
                furnish_base(trees)
            groups = [nest(tree, request.destination) for tree in _grouped(trees, request)]
            pack, place = bench.finish(groups)
        finally:
            bench.close()
        tell(BuildProgress("publish"))
        drafts: list[Draft] = []
        provenance = _provenance(store, request, fetched)
        for number, tree in enumerate(groups, 1):
            top = number == len(groups)
            drafts.append(
                draft_tree(
                    tree,
                    pack=pack,
                    folder=place,
                    kind=request.kind,
                    source=request.source.text,
                    name=request.reference.name,
                    reference=request.reference if top else None,
                    configuration=_settings(request, fetched) if top else None,
                    provenance=provenance,
                    below=[draft.manifest.digest for draft in drafts],
                    brought=bench.brought,
                )
            )
        publish_drafts(layers, drafts, pack=pack, folder=place)
    return store.show(str(request.reference))


def _settings(request: _Request, fetched: Fetched) -> Configuration:
    settings = fetched.configuration
    if not settings.workdir and request.kind == "workspace" and request.destination != "/":
        return msgspec.structs.replace(settings, workdir=request.destination)
    return settings


def _provenance(store: EnvironmentStore, request: _Request, fetched: Fetched) -> dict[str, str]:
    """What is told of the layer: where from, by which command and with what, and what the name meant before."""
    found = {"dsec": version("dsec"), "host": f"{platform.system()} {platform.release()} {platform.machine()}"}
    if request.command:
        found["command"] = request.command.encode(errors="backslashreplace").decode()
    with contextlib.suppress(DSecError):  # it meant nothing, or what it meant is lost
        found["replaces"] = store.layers.digest_of(request.reference)
    return found | fetched.provenance


def _grouped(trees: Sequence[Node], request: _Request) -> list[Node]:
    """Consecutive layers become one as long as their contents stay below the limit; whiteouts stay where something lies below.

    Those of an image's layers are for the image's own layers: below its lowest nothing is meant.
    """
    limit = request.collapse_below
    whole = request.kind == "base" or request.source.scheme in ("oci", "docker")
    groups: list[list[Node]] = []
    size = 0
    for tree in trees:
        own = data_bytes(tree)
        if groups and limit > 0 and size + own <= limit:
            groups[-1].append(tree)
            size += own
        else:
            groups.append([tree])
            size = own
    return [collapse(group, keep_whiteouts=number > 0 or not whole) for number, group in enumerate(groups)]
