"""From a tree whose contents are packed to a layer in the store, with its name: all at once, or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dsec.environments.durable import digest_file
from dsec.environments.erofs import write_image
from dsec.environments.extents import encode_extents, measure
from dsec.environments.manifest import Configuration, Identity, Kind, Manifest, PackUse, identity_digest
from dsec.environments.names import Reference, check_digest
from dsec.environments.parallel import at_once
from dsec.environments.store import EXTENTS, METADATA, LayerStore
from dsec.environments.trees.model import Node, Pack
from libdsec.errors import InvalidArgument

__all__ = ["Draft", "draft_tree", "import_of", "publish_drafts"]


_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """A layer that is written but not there yet. `reference` and `imported` see `draft_tree`."""

    folder: Path
    manifest: Manifest
    reference: Reference | None
    imported: str | None


def draft_tree(
    root: Node,
    *,
    pack: Pack | None,
    folder: Path,
    kind: Kind,
    source: str,
    name: str = "",
    reference: Reference | None = None,
    imported: str | None = None,
    configuration: Configuration | None = None,
    provenance: Mapping[str, str] | None = None,
    below: Sequence[str] = (),
    brought: Collection[str] = (),
) -> Draft:
    """Write the image of `root`, whose new contents are in `pack` (what `Packer.finish` gave; its files are in `folder`).

    `folder` is the leased one of the build; several layers may be written there, with one pack. `reference` is the tag that is to mean the
    layer; `imported` is the digest (hex) of the tar that it was, by which `import_of` finds it again. A layer that has neither goes with
    the next collection of garbage. `brought` are packs that came into the store for it before, which is only told of it.

    ValueError for a tree that EROFS cannot hold.
    """
    draft = folder / f"layer-{secrets.token_hex(4)}"
    draft.mkdir(mode=0o700)
    packs = write_image(root, draft / METADATA)
    extents, contents = measure(root, packs, {*brought, pack.digest} if pack is not None else brought)
    (draft / EXTENTS).write_bytes(encode_extents(extents))
    identity = Identity(
        kind=kind,
        metadata=digest_file(draft / METADATA),
        packs=[PackUse(digest=each.digest, size=each.size) for each in packs],
        configuration=configuration if configuration is not None else Configuration(),
        below=list(below),
    )
    manifest = Manifest(
        digest=identity_digest(identity),
        identity=identity,
        name=name or (reference.name if reference is not None else ""),
        source=source,
        created_at=time.time(),
        provenance=dict(provenance or {}),
        contents=contents,
    )
    return Draft(draft, manifest, reference, imported)


def publish_drafts(store: LayerStore, drafts: Sequence[Draft], *, pack: Pack | None, folder: Path) -> list[Manifest]:
    """Bring in `pack`, if a draft refers to it, and make the layers visible, each below those that are a difference to it.

    What takes time is done before others are made to wait, and disks do several such things as fast as one. Raises ContentsLost if a pack
    that a tree refers to has gone: the caller builds again.
    """
    at_once([partial(store.seal, draft.folder, draft.manifest) for draft in drafts], _AT_ONCE)
    with store.settled(exclusive=False):
        if pack is not None and any(use.digest == pack.digest for draft in drafts for use in draft.manifest.identity.packs):
            with store.building.lease() as aside:
                store.packs.place(folder, pack, aside=aside)
        published = [store.publish(draft.folder, draft.manifest) for draft in drafts]
        store.sync_layers()
        for draft, manifest in zip(drafts, published, strict=True):
            if draft.imported is not None:
                # a crash may spoil it: then it names no layer, and the tar is read again
                fresh = folder / f"import-{secrets.token_hex(4)}"
                fresh.write_text(f"{manifest.digest}\n")
                fresh.rename(_entry(store, draft.imported))
            if draft.reference is not None:
                store.set_tag(draft.reference, manifest.digest)
    return published


def import_of(store: LayerStore, tar_digest: str) -> str | None:
    """The layer that a tar with this digest (hex) became earlier, if it is still there whole; it stays for some time after this.

    InvalidArgument for what is no digest.
    """
    entry = _entry(store, tar_digest)
    with contextlib.suppress(OSError, InvalidArgument), store.settled(exclusive=False):
        digest = check_digest(entry.read_text(errors="replace").strip())
        if store.folder(digest).is_dir() and store.damage(digest) is None:
            os.utime(entry)
            store.refer(digest)
            return digest
    return None


def _entry(store: LayerStore, tar_digest: str) -> Path:
    plain = tar_digest.removeprefix("sha256:")
    check_digest(f"sha256:{plain}", field="source")
    return store.root / "imports" / plain
