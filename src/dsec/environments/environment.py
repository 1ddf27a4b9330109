"""Environments of a node: names to layers, layers to mounts. What edge, the backends and the command line use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsec.environments.blobcache import PackAccess, StoreSettings
from dsec.environments.garbage import GRACE_SECONDS, SILENT_SECONDS, Garbage, GarbageReport
from dsec.environments.leases import LeasedFolders
from dsec.environments.manifest import KINDS, Configuration, Kind, Manifest, merged_configuration
from dsec.environments.names import Reference, check_digest, parse_reference
from dsec.environments.node import NodeLayers
from dsec.environments.report import StoreReport, report_store
from dsec.environments.store import LayerStore
from dsec.environments.tags import DamagedTag, TagEntry
from dsec.environments.verify import VerifyReport, verify_store
from libdsec.errors import Conflict, InvalidArgument, NotFound, SandboxFailed
from libdsec.schema import EnvironmentInfo

__all__ = ["EnvironmentStore", "ResolvedEnvironment", "ResolvedLayer"]


@dataclass(frozen=True, slots=True)
class ResolvedLayer:
    """A reference with the digest that it meant when it was resolved."""

    name: str
    digest: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True)
class ResolvedEnvironment:
    """Layers from the bottom, and their settings merged: of each setting the topmost layer's counts, `env` name by name."""

    layers: list[ResolvedLayer]
    env: dict[str, str]
    workdir: str
    user: str
    entrypoint: list[str]
    command: list[str] = field(default_factory=list)
    """That of the topmost layer which has an entrypoint or a command."""

    @property
    def digests(self) -> list[str]:
        """From the bottom."""
        return [layer.digest for layer in self.layers]


class EnvironmentStore:
    """The layers in `store` (default `<state>/store`) as this node sees them. Cheap to construct; thread-safe.

    `acquire` of a layer never seen copies its metadata and mounts it; all else is quick. Layers already mounted cost no call to the store.
    """

    def __init__(
        self,
        state: Path,
        run: Path,
        store: Path | None = None,
        *,
        store_deadline_seconds: float | None = None,
        settings: StoreSettings | None = None,
    ) -> None:
        settings = settings or StoreSettings()
        deadline = store_deadline_seconds if store_deadline_seconds is not None else settings.patience_seconds
        self.state, self.run = Path(state), Path(run)
        self.layers = LayerStore(Path(store) if store is not None else self.state / "store")
        self.staging = LeasedFolders(self.state / "staging")
        self.access = PackAccess(self.state, self.run, self.layers.packs.folder, settings)
        self._garbage = Garbage(self.layers, lambda: self.node.held())
        self.node = NodeLayers(self.state, self.run, self.layers, self.staging, self.access, store_deadline_seconds=deadline)

    # -- for sandboxes -------------------------------------------------------------------------------------------------------------------

    def resolve(self, refs: Sequence[str], *, field: str = "environment") -> ResolvedEnvironment:
        """Digests of the references and the merged settings. `field` is what errors name.

        A layer that is a difference to others brings those with it. NotFound for an unknown name, InvalidArgument for a misspelt one or an
        order other than one base, workspaces, toolkits; SandboxFailed(cause="store-lost") for what the store cannot give.
        """
        if not refs:
            raise InvalidArgument(f"{field}: at least a base is needed", field=field)
        layers: list[ResolvedLayer] = []
        settings: list[Configuration] = []
        kinds: list[Kind] = []
        for text in refs:
            reference = parse_reference(text, field=field)
            digest = self.layers.digest_of(reference, field=field)
            stack = self._stack(reference.name, digest)
            for layer, configuration in stack:
                if any(other.digest == layer.digest for other in layers):
                    raise InvalidArgument(f"{field}: the layer {layer} of {text} is there already, lower down", field=field)
                layers.append(layer)
                settings.append(configuration)
            kinds.append(stack[0][0].kind)
        order = [KINDS.index(kind) for kind in kinds]
        if order != sorted(order) or order.count(0) != 1 or "snapshot" in kinds:
            given = ", ".join(f"{text} ({kind})" for text, kind in zip(refs, kinds, strict=True))
            raise InvalidArgument(f"{field}: one base, then workspaces, then toolkits; given: {given}", field=field)
        said = merged_configuration(settings)
        return ResolvedEnvironment(layers, said.env, said.workdir, said.user, said.entrypoint, said.command)

    def _stack(self, name: str, digest: str) -> list[tuple[ResolvedLayer, Configuration]]:
        """The layer with those that it is a difference to, from the bottom. Its lowest layer says what it is."""
        identity = self.layers.manifest(digest, name=name).identity
        stack: list[tuple[ResolvedLayer, Configuration]] = []
        for below in identity.below:
            manifest = self.layers.manifest(below)
            stack.append((ResolvedLayer(manifest.name or name, below, manifest.identity.kind), manifest.identity.configuration))
        return [*stack, (ResolvedLayer(name, digest, identity.kind), identity.configuration)]

    def acquire(self, digests: Sequence[str], owner: str) -> list[str]:
        """See `NodeLayers.acquire`."""
        return self.node.acquire([check_digest(digest, field="environment") for digest in digests], owner)

    def absent(self, digests: Sequence[str]) -> bool:
        """Whether `acquire` of these would have to ask the store. Quick, and only as good as what this process knows."""
        return self.node.absent(digests)

    def close(self) -> None:
        """End the server of packs, if one runs and nothing is mounted any more."""
        self.node.close()

    def release(self, owner: str) -> None:
        """See `NodeLayers.release`."""
        self.node.release(owner)

    def sweep_mounts(self, keep_owners: Collection[str] | Callable[[], Collection[str]]) -> list[str]:
        """See `NodeLayers.sweep`."""
        return self.node.sweep(keep_owners)

    def sweep_builds(self) -> list[str]:
        """Remove what builds that died have left, in the store and in the state folder."""
        return [*self.layers.building.sweep(), *self.staging.sweep()]

    # -- for people ----------------------------------------------------------------------------------------------------------------------

    def show(self, name: str) -> EnvironmentInfo:
        """One environment by reference."""
        reference = parse_reference(name, field="name")
        digest = self.layers.digest_of(reference, field="name")
        return _info(reference, self.layers.manifest(digest, name=reference.name), self.node.uses())

    def remove(self, name: str) -> None:
        """Take a tag away. By digest: all tags that mean the layer now. What nothing else uses goes with the next collection of garbage.

        Conflict while a sandbox of this node uses the layer and no other tag means it. Of two removals at once one succeeds, the other is
        NotFound. SandboxFailed(cause="store-lost") if the store cannot be written to.
        """
        try:
            self._remove(name)
        except OSError as error:
            raise SandboxFailed(f"name: {name} cannot be removed: {error}", field="name", cause="store-lost", ran="unknown") from error

    def _remove(self, name: str) -> None:
        reference = parse_reference(name, field="name")
        with self.layers.settled(exclusive=False):
            while True:
                try:
                    digest = self.layers.digest_of(reference, field="name")
                except DamagedTag:  # it has no other use than to be removed
                    self.layers.tags.remove(reference)
                    return
                meaning = [tag for tag, meant in self.layers.tags.all() if meant == digest]
                going = meaning if reference.digest is not None else [reference]
                if not set(meaning) - set(going) and (owners := self.node.uses().get(digest)):
                    in_use = f"name: {name} is in use by {len(owners)} sandboxes, {min(owners)} among them"
                    raise Conflict(in_use, field="name", cause="in-use")
                # a tag that means something else by now was looked at as what it is no more
                if sum(self.layers.tags.remove(tag, expected=digest) for tag in going):
                    return
                if reference.digest is not None:
                    raise NotFound(f"name: no environment named {name}", field="name")

    def history(self, name: str) -> Sequence[TagEntry]:
        """What a tag has meant, the oldest first. NotFound for an unknown one."""
        return self.layers.tags.history(parse_reference(name, field="name"), field="name")

    # -- the store -----------------------------------------------------------------------------------------------------------------------

    def collect_garbage(
        self, *, grace_seconds: float = GRACE_SECONDS, dry_run: bool = False, not_within_seconds: float = 0.0
    ) -> GarbageReport:
        """See `Garbage.collect`; on this node mounts that nobody uses go at once, and local copies with their layers."""
        if not (self.layers.root / "layers").is_dir():
            if self.layers.root == self.state / "store":
                return GarbageReport(dry_run=dry_run)
            raise SandboxFailed(f"store: {self.layers.root} is no store, or it is away", field="store", cause="store-lost", ran="not-run")
        self.layers.prepare()
        if not dry_run:
            self.sweep_builds()
            self.node.sweep(self.node.owners)
        report = self._garbage.collect(grace_seconds=grace_seconds, dry_run=dry_run, not_within_seconds=not_within_seconds)
        if report.layers and not dry_run:
            self.node.sweep(self.node.owners)
        return report

    def report(self) -> StoreReport:
        """See `report_store`."""
        return report_store(self.layers, now=self.layers.now(), silent_seconds=SILENT_SECONDS)

    def verify(self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """See `verify_store`; metadata come back from this node's copies."""
        return verify_store(self.layers, repair=repair, copies=self.state / "layers", progress=progress)

    def list(self) -> list[EnvironmentInfo]:
        """All named environments. Those whose manifest cannot be read are listed with no sizes and what is wrong as their `source`."""
        uses = self.node.uses()
        found: list[EnvironmentInfo] = []
        for reference, digest in self.layers.tags.all():
            try:
                found.append(_info(reference, self.layers.manifest(digest, name=reference.name), uses))
            except SandboxFailed as error:
                found.append(EnvironmentInfo(name=_label(reference), digest=digest, kind="base", source=f"damaged: {error.message}"))
        return found


def _label(reference: Reference) -> str:
    return reference.name if reference.tag == "latest" else str(reference)


def _info(reference: Reference, manifest: Manifest, uses: dict[str, set[str]]) -> EnvironmentInfo:
    identity, contents = manifest.identity, manifest.contents
    return EnvironmentInfo(
        name=_label(reference),
        digest=manifest.digest,
        kind=identity.kind,
        metadata_bytes=identity.metadata.size,
        data_bytes=contents.data_bytes,
        stored_bytes=contents.stored_bytes,
        logical_bytes=contents.logical_bytes,
        files=contents.files,
        packs=len(identity.packs),
        below=[*identity.below],
        created_at=manifest.created_at,
        source=manifest.source,
        provenance=dict(manifest.provenance),
        env=dict(identity.configuration.env),
        workdir=identity.configuration.workdir,
        user=identity.configuration.user,
        entrypoint=[*identity.configuration.entrypoint],
        command=[*identity.configuration.command],
        mounted=len(uses.get(manifest.digest, ())),
    )
