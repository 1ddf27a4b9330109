"""The real fix, as the edits that an agent would make: the difference between two releases' source folders."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Edit", "edits_between"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old`, which occurs once in the file, by `new`. `path` is relative to the source folder."""

    path: str
    old: str
    new: str


def edits_between(old_root: Path, new_root: Path) -> list[Edit]:
    """Edits that turn the Python files below `old_root` into those below `new_root`, to be applied in order.

    Each hunk is widened by the lines around it until its text is unique in the file as it is at that moment. An edit whose `old` is empty
    makes a new file. Raises ValueError where the releases differ by a removed file, which no edit can say.
    """
    edits: list[Edit] = []
    names = sorted({str(path.relative_to(root)) for root in (old_root, new_root) for path in root.rglob("*.py")})
    for name in names:
        before, after = old_root / name, new_root / name
        if not after.exists():
            raise ValueError(f"{name} is not in the newer release")
        if not before.exists():
            edits.append(Edit(name, "", after.read_bytes().decode()))
        else:
            edits += _file_edits(name, before.read_bytes().decode(), after.read_bytes().decode())
    return edits


def _file_edits(name: str, before: str, after: str) -> list[Edit]:
    lines, target = before.splitlines(keepends=True), after.splitlines(keepends=True)
    opcodes = [code for code in difflib.SequenceMatcher(None, lines, target, autojunk=False).get_opcodes() if code[0] != "equal"]
    edits: list[Edit] = []
    # From the end backwards, so that the line numbers of the hunks before stay true.
    for _, start, end, new_start, new_end in reversed(opcodes):
        current = "".join(lines)
        above = below = 0
        while True:
            head, tail = lines[start - above : start], lines[end : end + below]
            old = "".join([*head, *lines[start:end], *tail])
            # Not count(), which misses occurrences that overlap.
            if old and current.find(old) == current.rfind(old):
                break
            if above >= start and end + below >= len(lines):
                raise ValueError(f"{name}: a hunk cannot be made unique")
            above, below = min(above + 1, start), below + (end + below < len(lines))
        edits.append(Edit(name, old, "".join([*head, *target[new_start:new_end], *tail])))
        lines[start:end] = target[new_start:new_end]
    return edits
