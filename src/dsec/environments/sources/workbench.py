"""What a build works with: the pack that contents go to, the layers that are known, the room that there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsec.environments.erofs import read_image
from dsec.environments.packs import ContentsLost, KnownContents, Packer
from dsec.environments.packs.limit import limit_packs
from dsec.environments.publish import draft_tree, import_of, publish_drafts
from dsec.environments.sources.archives import Budget
from dsec.environments.store import METADATA, LayerStore
from dsec.environments.trees import BLOCK, Node, Pack, Segment

__all__ = ["Workbench", "data_bytes"]

_BUDGET_SHARE: Final = 0.9
_PACK_BYTES: Final = 512 << 20
"""A pack that holds more than this takes in no further layer of an image: what is removed is removed by packs."""
_MANY_PACKS: Final = 16


class Workbench:
    """Of one build. `folder` is its leased one on the store's file system; `scratch` is for what is only needed meanwhile."""

    def __init__(self, layers: LayerStore, folder: Path, scratch: Path, known: KnownContents, *, source: str) -> None:
        self.layers = layers
        self.scratch = scratch
        self.budget = Budget(int(layers.bytes_free() * _BUDGET_SHARE))
        self._folder = folder
        self._known = known
        self._source = source
        self._packs: dict[str, Pack] = {}
        self._sealed = 0
        self._waiting: dict[str, Node] = {}
        self.brought: set[str] = set()
        """Digests of the packs that came into the store with layers of images."""
        self.promised: set[str] = set()
        """Digests of the tars that are not in the image, as the store had what they became."""
        self._begin()

    def _begin(self) -> None:
        self._place = self._folder / f"pack-{self._sealed}"
        self._place.mkdir(mode=0o700)
        self._packer = Packer(self._place, self._known, limit=int(self.layers.bytes_free() * _BUDGET_SHARE))

    def add(self, pieces: Iterable[bytes | int], size: int | None = None, /) -> tuple[int, bytes | None, tuple[Segment, ...]]:
        """Take in a file's content, see `Packer.add`."""
        return self._packer.add(pieces, size)

    def close(self) -> None:
        """Give up what is not published."""
        self._packer.close()

    # -- layers of images ----------------------------------------------------------------------------------------------------------------

    def imported(self, diff_id: str) -> Node | None:
        """The tree that the tar with this digest became, now or in an earlier build; None if it must be read. It is the caller's alone."""
        if diff_id in self._waiting:
            self.publish_imports()
        digest = import_of(self.layers, diff_id)
        if digest is not None:
            with contextlib.suppress(OSError, ValueError):  # it has gone meanwhile, or is damaged
                tree = read_image(self.layers.folder(digest) / METADATA, self._packs)
                self.budget.tally.add_tree(tree)
                return tree
        if diff_id in self.promised:
            raise ContentsLost(f"the layer that the tar {diff_id} became has gone since it was not fetched")
        return None

    def keep_import(self, diff_id: str, tree: Node) -> None:
        """The tar with this digest is `tree`: to be published before that is changed."""
        self._waiting[diff_id] = tree
        if self._packer.bytes_stored >= _PACK_BYTES:
            self.publish_imports()

    def publish_imports(self) -> None:
        """Make what was read layers of their own, so that nobody reads it again, whatever becomes of this build."""
        if not self._waiting:
            return
        pack = self._packer.finish()
        if pack is not None:
            self.brought.add(pack.digest)
        drafts = [
            draft_tree(tree, pack=pack, folder=self._place, kind="snapshot", source=self._source, name="import", imported=diff_id)
            for diff_id, tree in self._waiting.items()
        ]
        publish_drafts(self.layers, drafts, pack=pack, folder=self._place)
        self._waiting.clear()
        self._sealed += 1
        self._known.refresh()
        self._begin()

    # -- what is published ---------------------------------------------------------------------------------------------------------------

    def finish(self, trees: Iterable[Node]) -> tuple[Pack | None, Path]:
        """End the pack, when `trees` are all that will be published with it; returns it and the folder that it is in.

        A tree whose contents are scattered over many packs gets those that it uses least stored anew.
        """
        for tree in trees:
            if len({segment.pack.digest for segment in _segments(tree)}) > _MANY_PACKS:
                limit_packs(tree, self._packer, self.layers.packs.folder)
        return self._packer.finish(), self._place


def _segments(tree: Node) -> Iterable[Segment]:
    folders = [tree]
    while folders:
        for node in (folders.pop().children or {}).values():
            if node.children is not None:
                folders.append(node)
            else:
                yield from node.segments


def data_bytes(tree: Node) -> int:
    """What its files take in packs, each segment once."""
    return sum({(segment.pack, segment.start): segment.count for segment in _segments(tree)}.values()) * BLOCK
