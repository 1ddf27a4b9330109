"""Mounting an EROFS image from plain files: a metadata image and the blobs that hold its data."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from dsec.kernel import mounts
from dsec.kernel.loop import attached_loop, backing_file
from dsec.kernel.mountinfo import Mount

__all__ = ["mount_erofs", "mounted_image"]


def mount_erofs(metadata: Path, blobs: Sequence[Path], target: str | os.PathLike[str], *, direct_io: bool = False) -> None:
    """Mount read-only at `target`. Blobs in the order in which the image numbers its devices; with `direct_io` they are read past the page
    cache of the file system that they are on.

    Where the kernel (before 6.12) or the file system of the image (tmpfs) has no mounts of plain files, it is done through loop devices,
    which go with the mount.

    nosuid and nodev hold for this mount, which the host sees; an overlay that takes it as a lower layer goes by its own flags.
    """
    try:
        _mount(metadata, blobs, target, direct_io=direct_io)
    except OSError as error:
        if error.errno != errno.ENOTBLK:
            raise
        with contextlib.ExitStack() as attached:
            devices = [attached.enter_context(attached_loop(file, read_only=True)) for file in (metadata, *blobs)]
            _mount(devices[0], devices[1:], target, direct_io=False)


def mounted_image(mount: Mount) -> Path | None:
    """The metadata image behind a mount of `mount_erofs`; None for another kind of mount."""
    if mount.kind != "erofs":
        return None
    return backing_file(mount.source) if mount.source.startswith("/dev/loop") else Path(mount.source)


def _mount(metadata: Path, blobs: Sequence[Path], target: str | os.PathLike[str], *, direct_io: bool) -> None:
    options: list[tuple[str, str | int | None]] = [("ro", None)]
    options += [("device", str(blob)) for blob in blobs]
    options += [("directio", None)] if direct_io else []
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
