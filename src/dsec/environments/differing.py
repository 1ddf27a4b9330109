"""In what two environments differ, file by file, from their metadata alone: contents are compared by the digests in the packs' indexes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator

from dsec.environments.environment import EnvironmentStore
from dsec.environments.erofs import read_image
from dsec.environments.names import parse_reference
from dsec.environments.packs import read_index
from dsec.environments.store import METADATA, lost
from dsec.environments.trees import Difference, Node, Pack, collapse, compare

__all__ = ["differences", "read_environment"]


def read_environment(store: EnvironmentStore, name: str, packs: dict[str, Pack]) -> Node:
    """The tree that a reference means, with the layers that it is a difference to."""
    reference = parse_reference(name, field="name")
    digest = store.layers.digest_of(reference, field="name")
    stack = [*store.layers.manifest(digest, name=reference.name).identity.below, digest]
    trees = []
    for part in stack:
        try:
            trees.append(read_image(store.layers.folder(part) / METADATA, packs))
        except (OSError, ValueError) as error:
            raise lost(reference.name, part, str(error)) from error
    return trees[0] if len(trees) == 1 else collapse(trees, keep_whiteouts=False)


def differences(store: EnvironmentStore, before: str, after: str) -> Iterator[Difference]:
    """See `compare`. NotFound for an unknown name, SandboxFailed(cause="store-lost") for a layer that cannot be read."""
    packs: dict[str, Pack] = {}
    contents = _Contents(store)
    return compare(read_environment(store, before, packs), read_environment(store, after, packs), content=contents.of)


class _Contents:
    """Digests of files' contents, from the indexes of the packs that they lie in."""

    def __init__(self, store: EnvironmentStore) -> None:
        self._folder = store.layers.packs.folder
        self._indexes: dict[str, tuple[list[int], list[bytes]]] = {}

    def of(self, node: Node) -> Hashable:
        """What equal contents that were stored in one way have in common."""
        if node.inline is not None:
            return node.inline
        found: list[tuple[int, bytes]] = []
        for segment in node.segments:
            starts, digests = self._index(segment.pack.digest)
            at = bisect_right(starts, segment.start) - 1
            while at < len(starts) and starts[at] < segment.start + segment.count:
                found.append((segment.at + starts[at] - segment.start, digests[at]))
                at += 1
        return tuple(found)

    def _index(self, digest: str) -> tuple[list[int], list[bytes]]:
        if (known := self._indexes.get(digest)) is None:
            try:
                entries = list(read_index(self._folder, digest))
            except (OSError, ValueError) as error:
                raise lost("", digest, str(error)) from error
            known = self._indexes[digest] = [entry.start for entry in entries], [entry.digest for entry in entries]
        return known
