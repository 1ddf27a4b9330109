"""What a sandbox leaves lying about and a layer made from it does not bring along: rules about paths. Pure.

A rule is a glob from the root. `*` and `?` stop at a slash, `**` does not, `[...]` is a set of characters; a rule without a slash means the
name in any folder. What matches goes with all that is in it: `/tmp/*` leaves an empty /tmp, `/tmp` leaves none.

Both the rules and the paths are other people's. A name is held against one part of a rule in time that grows with their lengths alone, and
which parts may come next is kept as a set for each folder: nothing is ever tried in all combinations, as a regular expression would.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from libdsec.errors import InvalidArgument

__all__ = ["DEFAULT_RULES", "RENEWED_RULES", "Residue", "check_rules"]

DEFAULT_RULES: tuple[str, ...] = (
    "/tmp/*",
    "/var/tmp/*",
    "/var/cache/apt/archives/*.deb",
    "/var/cache/apt/archives/partial/*",
    "/root/.cache/pip",
    "/home/*/.cache/pip",
    "/root/.*_history",
    "/home/*/.*_history",
)
"""What nobody misses: temporary files, downloads that were installed, what was typed. `.*_history` are those of shells and interpreters."""

RENEWED_RULES: tuple[str, ...] = ("/var/lib/systemd/random-seed", "/var/lib/urandom/random-seed", "/var/lib/random-seed")
"""What two sandboxes must not have in common. Always left out, so that each makes its own."""

_MOST_RULES = 256
_LONGEST = 1024
_MOST_STARS = 12
_MOST_JOINTS = 3
"""`**` within a name: each doubles what a rule may mean."""


def check_rules(rules: Sequence[str], *, field: str = "scrub") -> None:
    """InvalidArgument for what is no rule."""
    if len(rules) > _MOST_RULES:
        raise InvalidArgument(f"{field}: {len(rules)} rules, at most {_MOST_RULES} are allowed", field=field)
    for rule in rules:
        if (
            not rule.strip("/")
            or len(rule) > _LONGEST
            or rule.count("*") > _MOST_STARS
            or "\0" in rule
            or "//" in rule
            or ".." in rule.split("/")
        ):
            raise InvalidArgument(f"{field}: {rule!r:.100} is no glob of paths inside the sandbox", field=field)
        if "/" in rule.rstrip("/") and not rule.startswith(("/", "**/")):
            raise InvalidArgument(f"{field}: {rule!r:.100} begins with neither '/' nor '**/'", field=field)
        _parsed(rule, field)


class Residue:
    """Rules together. `matches` takes a path from the root without a leading slash, as bytes; it is quick for a folder's names in a row."""

    def __init__(self, rules: Iterable[str]) -> None:
        self._rules = [parts for rule in rules for parts in _parsed(rule, "scrub")]
        self._folder: bytes = b""
        self._states = self._begun = [state for number in range(len(self._rules)) for state in self._reached(number, 0)]

    def matches(self, path: bytes) -> bool:
        """Whether a rule means this very path."""
        folder, slash, name = path.rpartition(b"/")
        if slash and not folder:
            return False
        if folder != self._folder:
            states = self._begun
            for above in folder.split(b"/") if folder else ():
                states = self._after(states, above)
            self._folder, self._states = folder, states
        for number, at in self._states:
            parts = self._rules[number]
            if at == len(parts) - 1 and (part := parts[at]) is not None and part.matches(name):
                return True
        return False

    def _after(self, states: Sequence[tuple[int, int]], name: bytes) -> list[tuple[int, int]]:
        """Where each rule may go on below a folder of that name."""
        found: dict[tuple[int, int], None] = {}
        for number, at in states:
            parts = self._rules[number]
            part = parts[at]
            if part is None:
                found.update(dict.fromkeys(self._reached(number, at)))
            elif at + 1 < len(parts) and part.matches(name):
                found.update(dict.fromkeys(self._reached(number, at + 1)))
        return list(found)

    def _reached(self, number: int, at: int) -> list[tuple[int, int]]:
        """A place in a rule, and those behind what may stand for no folder at all."""
        reached = [(number, at)]
        while self._rules[number][at] is None:
            at += 1
            reached.append((number, at))
        return reached


class _Part:
    """What one name has to be: pieces of fixed length, with anything in between."""

    def __init__(self, text: str) -> None:
        self._pieces = [_piece(piece) for piece in text.split("*")]
        self._shortest = sum(length for _, length in self._pieces)

    def matches(self, name: bytes) -> bool:
        """The first piece is where the name begins, the last where it ends, and each in between the sooner, the better."""
        if len(name) < self._shortest:
            return False
        (first, at), *between = self._pieces
        if not between:
            return len(name) == at and first.match(name) is not None
        last, length = between.pop()
        end = len(name) - length
        if first.match(name) is None or last.match(name, end) is None:
            return False
        for piece, length in between:
            found = piece.search(name, at, end)
            if found is None:
                return False
            at = found.start() + length
        return at <= end


def _piece(text: str) -> tuple[re.Pattern[bytes], int]:
    """A piece without stars as a regular expression, which has nothing to choose from, and its length in bytes."""
    made, length, at = b"", 0, 0
    while at < len(text):
        if text[at] == "?":
            made, length, at = made + b".", length + 1, at + 1
        elif text[at] == "[" and (end := text.find("]", at + 2)) > 0:
            inside = text[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            negated = "^" if inside[0] in "!^" else ""
            inside = negated + (inside[1:] if negated else inside).replace("^", "\\^")
            made, length, at = made + b"[" + inside.encode("utf-8", "surrogateescape") + b"]", length + 1, end + 1
        else:
            literal = text[at].encode("utf-8", "surrogateescape")
            made, length, at = made + re.escape(literal), length + len(literal), at + 1
    return re.compile(made, re.DOTALL), length


_Parts = list[_Part | None]
"""None stands for any number of folders, none included; never at the end."""


def _parsed(rule: str, field: str) -> list[_Parts]:
    """What a rule means: one of these, which differ where `**` within a name stops at no slash."""
    text = rule.rstrip("/")
    if "/" not in text:
        text = "**/" + text
    found: list[list[str | None]] = [[]]
    joints = 0
    for part in text.removeprefix("/").split("/"):
        pieces = re.split(r"\*{2,}", part)
        if pieces == ["", ""]:
            ways: list[list[str | None]] = [[None]]
        else:
            ways = [[pieces[0]]]
            for piece in pieces[1:]:
                joints += 1
                ways = [way for made in ways for way in (_joined(made, piece), [*made[:-1], f"{made[-1]}*", None, f"*{piece}"])]
                if joints > _MOST_JOINTS:
                    raise InvalidArgument(f"{field}: {rule!r:.100} has `**` within names more than {_MOST_JOINTS} times", field=field)
        found = [made + way for made in found for way in ways]
    known: dict[str, _Part] = {}
    try:
        return [
            [None if part is None else known.setdefault(part, _Part(part)) for part in ([*made, "*"] if made[-1] is None else made)]
            for made in found
        ]
    except re.error as error:
        raise InvalidArgument(f"{field}: {rule!r:.100} is no glob: {error}", field=field) from None


def _joined(made: list[str | None], piece: str) -> list[str | None]:
    return [*made[:-1], f"{made[-1]}*{piece}"]
