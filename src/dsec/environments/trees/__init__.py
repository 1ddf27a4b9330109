"""File trees as values: what a layer holds, how layers merge, in what they differ. No I/O but in `walk`."""

from __future__ import annotations

from dsec.environments.trees.compare import Aspect, Difference, compare
from dsec.environments.trees.merge import ORIGIN, collapse, merge, settle
from dsec.environments.trees.model import BLOCK, OPAQUE, REDIRECT, Node, Pack, Segment, folder, is_whiteout, whiteout
from dsec.environments.trees.walk import AddContent, keep_all, keep_overlay_marks, walk

__all__ = [
    "BLOCK",
    "OPAQUE",
    "ORIGIN",
    "REDIRECT",
    "AddContent",
    "Aspect",
    "Difference",
    "Node",
    "Pack",
    "Segment",
    "collapse",
    "compare",
    "folder",
    "is_whiteout",
    "keep_all",
    "keep_overlay_marks",
    "merge",
    "settle",
    "walk",
    "whiteout",
]
