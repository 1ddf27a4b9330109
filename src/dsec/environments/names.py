"""Names of environments and how a reference to one is written: `name`, `name:tag` or `name@sha256:<64 hex>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from libdsec.errors import InvalidArgument

__all__ = ["DEFAULT_TAG", "Reference", "check_digest", "check_name", "check_owner", "check_tag", "parse_reference"]

DEFAULT_TAG = "latest"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(?:/[A-Za-z0-9][A-Za-z0-9._+-]*)*")
_NAME_LIMIT = 200
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Reference:
    """Exactly one of `tag` and `digest` is set."""

    name: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest is not None else f"{self.name}:{self.tag}"


def check_name(name: str, *, field: str = "name") -> str:
    """`name` itself, or InvalidArgument."""
    if len(name) > _NAME_LIMIT or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{field}: {name!r:.220} is no environment name; letters, digits, '.', '_', '+', '-' and '/' between parts, each part "
            f"beginning with a letter or digit, at most {_NAME_LIMIT} characters",
            field=field,
        )
    return name


def check_tag(tag: str, *, field: str = "tag") -> str:
    """`tag` itself, or InvalidArgument."""
    if not _TAG.fullmatch(tag):
        raise InvalidArgument(f"{field}: {tag!r:.140} is no tag; letters, digits, '.', '_', '-', at most 128 characters", field=field)
    return tag


def check_digest(digest: str, *, field: str = "digest") -> str:
    """`digest` itself, or InvalidArgument."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidArgument(f"{field}: {digest!r:.140} is no digest; 'sha256:' and 64 lower-case hex digits", field=field)
    return digest


def check_owner(owner: str, *, field: str = "sandbox_id") -> str:
    """An id that may be a file's name, or InvalidArgument."""
    if not _OWNER.fullmatch(owner):
        raise InvalidArgument(f"{field}: {owner!r:.140} is no id; letters, digits, '.', '_', '-', at most 128 characters", field=field)
    return owner


def parse_reference(text: str, *, field: str = "environment") -> Reference:
    """Read a reference; without a tag or digest it means the tag `latest`."""
    name, at, digest = text.partition("@")
    if at:
        return Reference(check_name(name, field=field), digest=check_digest(digest, field=field))
    name, colon, tag = text.partition(":")
    return Reference(check_name(name, field=field), tag=check_tag(tag, field=field) if colon else DEFAULT_TAG)
