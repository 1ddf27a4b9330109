"""Mounting an EROFS image from plain files: a metadata image and the blobs that hold its data. No loop device is involved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dsec.kernel import mounts

__all__ = ["SUPERBLOCK_MAGIC", "mount_erofs"]

SUPERBLOCK_MAGIC = 0xE0F5E1E2
"""Little-endian at byte 1024 of an image."""


def mount_erofs(metadata: Path, blobs: Sequence[Path], target: str | os.PathLike[str]) -> None:
    """Mount read-only at `target`. Blobs in the order in which the image numbers its devices.

    nosuid and nodev hold for this mount, which the host sees; an overlay that takes it as a lower layer goes by its own flags.
    """
    options: list[tuple[str, str | int | None]] = [("ro", None)]
    options += [("device", str(blob)) for blob in blobs]
    mount = mounts.make_mount(
        "erofs",
        source=metadata,
        options=options,
        attributes=mounts.ATTR_RDONLY | mounts.ATTR_NOSUID | mounts.ATTR_NODEV | mounts.ATTR_NOATIME,
    )
    try:
        mounts.attach(mount, target)
    finally:
        os.close(mount)
