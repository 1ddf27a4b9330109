"""Building a layer: the source becomes a tree, the tree an image, the image a published layer with a name."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsec.environments.durable import digest_file
from dsec.environments.environment import EnvironmentStore
from dsec.environments.image import build_image
from dsec.environments.manifest import KINDS, Configuration, Identity, Kind, Manifest, identity_digest
from dsec.environments.names import DEFAULT_TAG, Reference, check_name, check_tag
from dsec.environments.sources import Source, fetch_source, parse_source
from dsec.environments.store import DATA, METADATA
from dsec.environments.tree import RootedTree, furnish_base
from libdsec.errors import InvalidArgument, QuotaExceeded
from libdsec.schema import EnvironmentInfo

__all__ = ["DEFAULT_DESTINATION", "BuildProgress", "build"]

DEFAULT_DESTINATION = "/workspace"


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """What a build does now: fetch, image, digest, publish. `done` and `total` are in bytes where `total` is known, else both are 0."""

    phase: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    reference: Reference
    source: Source
    kind: Kind
    destination: str
    include: Sequence[str] = field(default=())


def build(
    store: EnvironmentStore,
    name: str,
    *,
    source: str,
    kind: Kind | None = None,
    include: Sequence[str] = (),
    tag: str = DEFAULT_TAG,
    dest: str | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> EnvironmentInfo:
    """Build `source` and let `name:tag` mean the layer. Blocks for as long as it takes: run it in a thread.

    `source` is `debian:SUITE` (with the packages `include`), `dir:PATH`, `tar:PATH`, `oci:PATH` (layout or docker archive), or for a
    workspace `git:PATH[@REF]` and `sdist:PATH`. `kind` defaults to base, for git and sdist to workspace. `dest` is the folder in the
    sandbox that the tree lies in: for a base `/`, for others `/workspace` unless given.

    Raises InvalidArgument naming the field; QuotaExceeded(cause="disk") on a full disk; DSecError(cause="tool-failed") with what a tool
    said. On any failure, a kill included, nothing is visible; what is left in temporary folders goes with the next build or sweep.
    """
    request = _checked(name, source, kind, include, tag, dest)
    tell = progress if progress is not None else lambda _: None
    store.layers.prepare()
    store.sweep_builds()
    try:
        return _build(store, request, tell)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuotaExceeded(f"the disk is full while building {name}: {error}", cause="disk", ran="ran") from error
        raise


def _checked(name: str, source: str, kind: Kind | None, include: Sequence[str], tag: str, dest: str | None) -> _Request:
    reference = Reference(check_name(name), tag=check_tag(tag))
    parsed = parse_source(source)
    if kind is None:
        kind = "workspace" if parsed.scheme in ("git", "sdist") else "base"
    if kind not in KINDS:
        raise InvalidArgument(f"kind: {kind!r} is none of {', '.join(KINDS)}", field="kind")
    if kind == "base" and parsed.scheme in ("git", "sdist"):
        raise InvalidArgument(f"kind: {parsed.scheme} gives a workspace or toolkit, not a base", field="kind")
    if kind != "base" and parsed.scheme == "debian":
        raise InvalidArgument("kind: debian gives a base", field="kind")
    if include and parsed.scheme != "debian":
        raise InvalidArgument(f"include: only debian takes packages, not {parsed.scheme}", field="include")
    destination = dest if dest is not None else "/" if kind == "base" or parsed.scheme == "oci" else DEFAULT_DESTINATION
    if not destination.startswith("/") or "\0" in destination or ".." in destination.split("/"):
        raise InvalidArgument(f"dest: {destination!r} is no absolute path without '..'", field="dest")
    destination = "/" + "/".join(part for part in destination.split("/") if part not in ("", "."))
    if kind == "base" and destination != "/":
        raise InvalidArgument("dest: a base lies in /", field="dest")
    return _Request(reference, parsed, kind, destination, tuple(include))


def _build(store: EnvironmentStore, request: _Request, tell: Callable[[BuildProgress], None]) -> EnvironmentInfo:
    with store.staging.lease() as staging, store.layers.building.lease() as building:
        tree = staging / "tree"
        tree.mkdir(mode=0o755)
        tell(BuildProgress("fetch"))
        with RootedTree(tree) as rooted:
            fetched = fetch_source(
                request.source,
                rooted,
                request.destination,
                work=staging,
                include=request.include,
                progress=lambda done, total: tell(BuildProgress("fetch", done, total)),
            )
            if request.kind == "base":
                furnish_base(rooted)
        settings = fetched.configuration
        if not settings.workdir and request.kind == "workspace" and request.destination != "/":
            settings = Configuration(env=settings.env, workdir=request.destination, user=settings.user, entrypoint=settings.entrypoint)

        layer = building / "layer"
        layer.mkdir(mode=0o700)
        tell(BuildProgress("image"))
        build_image(tree, layer / METADATA, layer / DATA)
        identity = _identity(layer, request.kind, settings, tell)
        tell(BuildProgress("publish"))
        with store.layers.settled(exclusive=False):
            manifest = store.layers.publish(
                layer,
                Manifest(
                    digest=identity_digest(identity),
                    identity=identity,
                    name=request.reference.name,
                    source=request.source.text,
                    created_at=time.time(),
                    provenance=fetched.provenance,
                ),
            )
            store.layers.set_tag(request.reference, manifest.digest)
    return store.show(str(request.reference))


def _identity(layer: Path, kind: Kind, settings: Configuration, tell: Callable[[BuildProgress], None]) -> Identity:
    total = sum((layer / file).stat().st_size for file in (METADATA, DATA))
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        tell(BuildProgress("digest", done, total))

    return Identity(
        format="dsec-layer-1",
        kind=kind,
        metadata=digest_file(layer / METADATA, count),
        data=digest_file(layer / DATA, count),
        configuration=settings,
    )
