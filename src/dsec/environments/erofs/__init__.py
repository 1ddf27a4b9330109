"""EROFS images of our own writing: the metadata of a tree whose files' contents lie in packs."""

from __future__ import annotations

from dsec.environments.erofs.reader import read_image
from dsec.environments.erofs.writer import write_image
from dsec.environments.erofs.xattrs import check_xattrs, holds_xattr

__all__ = ["check_xattrs", "holds_xattr", "read_image", "write_image"]
