"""Layers made from a few files in memory, quicker than from sources, and read back through a mount."""

from __future__ import annotations

import random
import stat
from pathlib import Path

from dsec.environments.names import parse_reference
from dsec.environments.packs import ContentsLost, KnownContents, Packer
from dsec.environments.publish import draft_tree, publish_drafts
from dsec.environments.trees.model import Node, folder

__all__ = ["noise", "publish_files", "read_files"]


def noise(seed, size):
    return random.Random(seed).randbytes(size)


def publish_files(store, name, files, *, kind="base", below=(), imported=None, attempts=20, source="test", configuration=None):
    """A layer with these files (path without slashes to bytes), named `name` if that is given; stores only what no pack has."""
    while True:
        attempts -= 1
        try:
            with (
                store.layers.building.lease() as leased,
                KnownContents(store.state / "contents.db", store.layers.packs.folder) as known,
            ):
                known.refresh()
                packer = Packer(leased, known)
                root = folder()
                for path, content in files.items():
                    size, inline, segments = packer.add([content])
                    root.children[path.encode()] = Node(stat.S_IFREG | 0o644, size=size, inline=inline, segments=segments)
                pack = packer.finish()
                draft = draft_tree(
                    root,
                    pack=pack,
                    folder=leased,
                    kind=kind,
                    source=source,
                    reference=parse_reference(name) if name else None,
                    imported=imported,
                    below=below,
                    configuration=configuration,
                )
                [manifest] = publish_drafts(store.layers, [draft], pack=pack, folder=leased)
                return manifest
        except ContentsLost:
            if not attempts:
                raise


def read_files(path):
    """What is in the top folder of a mounted layer."""
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}
