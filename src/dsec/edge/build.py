"""Wiring: an edge with the backends that this host can serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dsec.edge.edge import Edge
from dsec.edge.settings import EdgeSettings

if TYPE_CHECKING:
    from dsec.environments import StoreSettings

__all__ = ["NodeSettings", "build_edge"]


class NodeSettings(Protocol):
    """Where a node keeps its things."""

    @property
    def state(self) -> Path: ...
    @property
    def run(self) -> Path: ...
    @property
    def store(self) -> Path | None: ...


def build_edge(
    settings: NodeSettings,
    *,
    name: str = "local",
    scratch: Path | None = None,
    packs: StoreSettings | None = None,
    edge_settings: EdgeSettings | None = None,
) -> Edge:
    """An edge over `settings`' folders, not yet open. `scratch`: folder or mount for writable layers, default below the state folder.

    `packs` is how the store is read.
    """
    # Imported here: the SDK's users and the machine's tests need no kernel interfaces.
    from dsec.backends.container.backend import ContainerBackend
    from dsec.environments import EnvironmentStore, ScratchStore
    from dsec.resources.cgroups import CgroupDriver
    from dsec.resources.hierarchies import probe
    from dsec.resources.plan import instance_name

    environments = EnvironmentStore(settings.state, settings.run, settings.store, settings=packs)
    environments.access.group = lambda: CgroupDriver(probe(), instance_name(settings.run)).daemons_dir
    scratch_store = ScratchStore(settings.state, settings.run, path=scratch)
    backend = ContainerBackend(environments, scratch_store, settings.run)
    return Edge(
        backends=[backend],
        environments=environments,
        state=settings.state,
        run=settings.run,
        name=name,
        settings=edge_settings,
    )
