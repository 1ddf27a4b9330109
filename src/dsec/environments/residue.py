"""What a sandbox leaves lying about and a layer made from it does not bring along: rules about paths. Pure.

A rule is a glob from the root. `*` and `?` stop at a slash, `**` does not, `[...]` is a set of characters; a rule without a slash means the
name in any folder. What matches goes with all that is in it: `/tmp/*` leaves an empty /tmp, `/tmp` leaves none.
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
"""Each more multiplies the time that matching may take."""


def check_rules(rules: Sequence[str], *, field: str = "scrub") -> None:
    """InvalidArgument for what is no rule."""
    if len(rules) > _MOST_RULES:
        raise InvalidArgument(f"{field}: {len(rules)} rules, at most {_MOST_RULES} are allowed", field=field)
    for rule in rules:
        if not rule.strip("/") or len(rule) > _LONGEST or rule.count("*") > _MOST_STARS or "\0" in rule or "//" in rule or ".." in rule.split("/"):
            raise InvalidArgument(f"{field}: {rule!r:.100} is no glob of paths inside the sandbox", field=field)
        if "/" in rule.rstrip("/") and not rule.startswith(("/", "**/")):
            raise InvalidArgument(f"{field}: {rule!r:.100} begins with neither '/' nor '**/'", field=field)
        _pattern(rule, field)


class Residue:
    """Rules together. `matches` takes a path from the root without a leading slash, as bytes."""

    def __init__(self, rules: Iterable[str]) -> None:
        patterns = [_pattern(rule, "scrub") for rule in rules]
        self._regex = re.compile(b"|".join(patterns), re.DOTALL) if patterns else None

    def matches(self, path: bytes) -> bool:
        """Whether a rule means this very path."""
        return self._regex is not None and self._regex.fullmatch(path) is not None


def _pattern(rule: str, field: str) -> bytes:
    """The rule as a regular expression over whole paths."""
    text = rule.rstrip("/")
    if "/" not in text:
        text = "**/" + text
    made = ""
    at = 0
    text = text.removeprefix("/")
    while at < len(text):
        if text.startswith("**/", at):
            made, at = made + "(?:[^/]+/)*", at + 3
        elif text.startswith("**", at):
            made, at = made + ".*", at + 2
        elif text[at] == "[" and (end := text.find("]", at + 2)) > 0:
            inside = text[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            made, at = made + "[" + ("^/" + inside[1:] if inside[0] in "!^" else inside) + "]", end + 1
        else:
            made += {"*": "[^/]*", "?": "[^/]"}.get(text[at], re.escape(text[at]))
            at += 1
    try:
        return b"(?:" + re.compile(made.encode("utf-8", "surrogateescape")).pattern + b")"
    except re.error as error:
        raise InvalidArgument(f"{field}: {rule!r:.100} is no glob: {error}", field=field) from None
