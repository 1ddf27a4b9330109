"""What a node does before a sandbox's first layer can be read: metadata fetched and checked, mounts made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Block, Series
from dsec.environments import EnvironmentStore

__all__ = ["compose"]


def compose(folder: Path, store: Path, references: Sequence[str], image_bytes: int, times: int) -> dict[str, Any]:
    """Resolve and mount on nodes that have seen nothing (`never_seen`), then again on the same (`again`); below `folder`, nothing stays.

    `image_bytes` is what all layers are unpacked. The store's files may be in the page cache.
    """
    never, again = Block(), Block()
    fetched = 0
    for number in range(times):
        node = EnvironmentStore(folder / f"node-{number}", folder / f"node-{number}-run", store)
        try:
            for block, owner in ((never, "first"), (again, "second")):
                started = time.perf_counter()
                digests = [layer.digest for layer in node.resolve(references).layers]
                node.acquire(digests, owner)
                took = time.perf_counter() - started
                block.samples_ms.append(took * 1e3)
                block.wall_s += took
            fetched = sum(node.layers.manifest(digest).identity.metadata.size for digest in digests)
        finally:
            for owner in ("first", "second"):
                node.release(owner)
            node.node.sweep(())
            node.node.close()
    return {
        "layers": len(digests),
        "never_seen": Series([never]).to_json(),
        "again": Series([again]).to_json(),
        "fetched_mb": round(fetched / 1e6, 2),
        "fetched_share": round(fetched / image_bytes, 4),
        "how": "resolve and acquire of base, workspace and toolkit on a node with an empty state folder; no sandbox",
    }
