"""A snapshot of a sandbox becomes a layer: its upper folder is walked, what is residue left out, and the tree published.

Snapshots taken one after the other would stack up, and each layer is a mount for every sandbox: the consecutive ones on the top of a stack
are merged with the new one when they are many or small. Only metadata is read and written for that; the contents stay in their packs.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.environments.erofs import check_xattrs, holds_xattr, read_image
from dsec.environments.manifest import Configuration, FileDigest, Kind, Manifest, merged_configuration
from dsec.environments.names import Reference
from dsec.environments.packs import ContentsLost, KnownContents, Packer
from dsec.environments.packs.limit import limit_packs
from dsec.environments.publish import draft_tree, publish_drafts
from dsec.environments.residue import RENEWED_RULES, Residue
from dsec.environments.store import METADATA, LayerStore, lost
from dsec.environments.trees.merge import collapse
from dsec.environments.trees.model import OPAQUE, REDIRECT, Node, Pack, whiteout
from dsec.environments.trees.walk import keep_overlay_marks, walk
from dsec.kernel.paths import folder_open, is_there
from libdsec.errors import DSecError, QuotaExceeded, Unsupported

__all__ = ["PackPlan", "Packed", "StackLimits", "pack_snapshot"]

_TRIES: Final = 3
_DISK_SHARE: Final = 0.9
_GROWTH: Final = 16
_SLACK: Final = 1 << 30
"""A pack may take so many times the blocks that the files have, and this: a block between holes is stored with some that are zero. A
sandbox's disk limit is to mean something for the store, too."""

_UNIT: Final = 512
"""Of st_blocks."""
_TOLD: Final = 500
"""Characters of what is said of a tree that cannot be a layer: names in it are the sandbox's."""


@dataclass(frozen=True, slots=True)
class StackLimits:
    """How many consecutive snapshot layers a stack may have on its top, and up to how many bytes of metadata they are merged anyway."""

    layers: int = 8
    small_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What is to become of a snapshot. `layers` are the digests of the stack that the sandbox stands on, from the bottom."""

    reference: Reference
    kind: Kind
    source: str
    layers: list[str]
    scrub: list[str] = field(default_factory=list)
    configuration: Configuration = field(default_factory=Configuration)
    provenance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """The published layer, how many entries were residue, and how many earlier layers are merged into it."""

    manifest: Manifest
    scrubbed: int
    merged: int


def pack_snapshot(state: Path, layers: LayerStore, upper: Path, mounts: Sequence[Path], plan: PackPlan, limits: StackLimits) -> Packed:
    """Publish the difference that `upper` is. Blocks for as long as it takes; nothing is visible if it fails or dies.

    What a sandbox has written may be of any size and shape, and time and memory go with it: see `packprocess`. `mounts` are where the
    layers of the plan are mounted. Raises QuotaExceeded(cause="disk") on a full disk, Unsupported(cause="tree" or "too-deep") for what no
    layer can hold, DSecError where the store loses what is referred to again and again.
    """
    layers.prepare()
    for tried in range(1, _TRIES + 1):
        try:
            with layers.building.lease() as folder:
                return _Packing(state, layers, upper, mounts, plan, limits).run(folder)
        except ValueError as error:
            raise Unsupported(f"no layer can hold this: {error!s:.{_TOLD}}", cause="tree", ran="ran") from error
        except ContentsLost as error:
            if tried == _TRIES:
                raise DSecError(f"the store loses contents while they are used: {error}", cause="store-lost", ran="ran") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise QuotaExceeded(f"the store's disk is full: {error}", cause="disk", ran="ran") from error
            if error.errno == errno.E2BIG and error.filename:
                raise Unsupported(
                    f"no layer can hold the names of all attributes of {error.filename!s:.{_TOLD}}", cause="tree", ran="ran"
                ) from error
            raise
    raise AssertionError("the last try returns or raises")


class _Packing:
    def __init__(
        self,
        state: Path,
        layers: LayerStore,
        upper: Path,
        mounts: Sequence[Path],
        plan: PackPlan,
        limits: StackLimits,
    ) -> None:
        self._state = state
        self._layers = layers
        self._upper = upper
        self._mounts = mounts
        self._plan = plan
        self._limits = limits
        self._residue = Residue([*plan.scrub, *RENEWED_RULES])
        self._left_out: list[bytes] = []
        self._room = int(layers.bytes_free() * _DISK_SHARE)
        self._allocated = 0

    def run(self, folder: Path) -> Packed:
        known = KnownContents(self._state / "contents.db", self._layers.root / "packs")
        with closing(known), closing(Packer(folder, known)) as packer:
            known.refresh()

            def skip(path: bytes, status: os.stat_result) -> bool:
                if self._skip(path, status):
                    return True
                self._allocated += status.st_blocks * _UNIT
                packer.limit = min(self._room, self._allocated * _GROWTH + _SLACK)
                return False

            root = walk(self._upper, packer.add, keep_xattr=_kept, skip=skip)
            check_xattrs(root)
            packer.limit = self._room
            self._hide_left_out(root)
            below, above = self._split()
            packs: dict[str, Pack] = {}
            root = collapse([*(self._tree(digest, packs) for digest in above), root], keep_whiteouts=True)
            limit_packs(root, packer, self._layers.root / "packs")
            pack = packer.finish()
            plan = self._plan
            settings = merged_configuration([*(self._layers.manifest(each).identity.configuration for each in above), plan.configuration])
            draft = draft_tree(
                root,
                pack=pack,
                folder=folder,
                kind=plan.kind,
                source=plan.source,
                reference=plan.reference,
                configuration=settings,
                provenance={**plan.provenance, **({"merged": " ".join(above)} if above else {})},
                below=below if plan.kind == "snapshot" else (),
            )
            [manifest] = publish_drafts(self._layers, [draft], pack=pack, folder=folder)
        return Packed(manifest, len(self._left_out), len(above))

    def _split(self) -> tuple[list[str], list[str]]:
        """The layers that stay below, and the snapshots on the top of the stack that are merged with the new one."""
        layers = self._plan.layers
        cut = len(layers)
        small = 0
        while cut and (identity := self._layers.manifest(layers[cut - 1]).identity).kind == "snapshot":
            small += identity.metadata.size
            cut -= 1
        many = len(layers) - cut + 1 > self._limits.layers
        if self._plan.kind == "snapshot" and not many and small > self._limits.small_bytes:
            return layers, []
        return layers[:cut], layers[cut:]

    def _tree(self, digest: str, packs: dict[str, Pack]) -> Node:
        """What is merged gets a new digest, which must not cover up that the store has spoilt it."""
        manifest = self._layers.manifest(digest)
        data = (self._layers.folder(digest) / METADATA).read_bytes()
        if FileDigest(sha256=hashlib.sha256(data).hexdigest(), size=len(data)) != manifest.identity.metadata:
            raise lost(manifest.name, digest, "its metadata is not what its digest says")
        return read_image(io.BytesIO(data), packs)

    def _skip(self, path: bytes, status: os.stat_result) -> bool:
        if not self._residue.matches(path):
            return False
        if status.st_rdev == 0 and status.st_mode & 0o170000 == 0o020000:
            # a whiteout: what it hides was removed, and stays so
            return False
        self._left_out.append(path)
        return True

    def _hide_left_out(self, root: Node) -> None:
        """What is left out must not show again what a layer below has in its place."""
        with ExitStack() as opened:
            mounts = [opened.enter_context(folder_open(mount)) for mount in self._mounts]
            for path in self._left_out:
                *folders, name = path.split(b"/")
                found = _below(root, folders)
                if found is None:
                    continue
                folder, below = found
                if any(is_there(mount, [*below, name]) for mount in mounts):
                    assert folder.children is not None
                    folder.children[name] = whiteout()


def _kept(name: bytes) -> bool:
    """What a layer has no room for is about the file system that it lies on, as `btrfs.compression`."""
    return keep_overlay_marks(name) and holds_xattr(name)


def _below(root: Node, folders: Sequence[bytes]) -> tuple[Node, list[bytes]] | None:
    """The folder at that path and where it goes on in the layers below; None if it does not."""
    node, below = root, list[bytes]()
    for part in folders:
        child = (node.children or {}).get(part)
        if child is None or child.children is None or child.xattrs.get(OPAQUE) == b"y":
            return None
        redirect = child.xattrs.get(REDIRECT)
        if redirect is None:
            below = [*below, part]
        elif redirect.startswith(b"/"):
            below = redirect[1:].split(b"/")
        else:
            below = [*below, redirect]
        node = child
    return node, below
