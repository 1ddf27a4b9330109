"""What an image says of the containers that are to be made of it, taken for what a stranger says."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from dsec.environments.manifest import Configuration
from dsec.environments.sources.refusals import damaged

__all__ = ["ImageSettings", "configuration_of", "read_settings"]

_ARGUMENT_LIMIT: Final = 128 << 10
"""MAX_ARG_STRLEN of Linux, the closing NUL counted."""

_TOTAL_LIMIT: Final = 512 << 10
"""Of all words and variables: a command's own must have room beside them."""

_PATH_LIMIT: Final = 4096
_FOLDERS_LIMIT: Final = 1024
_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?(?::[A-Za-z0-9_][A-Za-z0-9_.-]*\$?)?")
_USER_LIMIT: Final = 128


class ImageSettings(msgspec.Struct, rename="pascal"):
    """Of the rest nothing matters here."""

    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    volumes: dict[str, Any] | None = None

    @property
    def folders(self) -> list[str]:
        """Volumes and the working directory: they exist in a container, made if the image has them not."""
        return [*sorted(self.volumes or {}), self.working_dir or "/"]


def read_settings(document: Any) -> ImageSettings:
    """The `config` of an image's configuration. InvalidArgument for what no command could be run with."""
    try:
        found = msgspec.convert(document or {}, ImageSettings)
    except msgspec.ValidationError as error:
        raise damaged(f"its settings are none: {error}") from error
    words = [*(found.entrypoint or []), *(found.cmd or [])]
    total = sum(_length(word, "a word of its command") for word in words)
    for variable in found.env or []:
        total += _length(variable, "a variable")
        name, equals, _ = variable.partition("=")
        if equals and (not name or not name.isprintable()):
            raise damaged(f"its settings are none: a variable is named {name!r:.100}")
    if total > _TOTAL_LIMIT:
        raise damaged(f"its command and its variables have {total} bytes, at most {_TOTAL_LIMIT} are allowed")
    if len(found.folders) > _FOLDERS_LIMIT:
        raise damaged(f"it has {len(found.folders)} volumes, at most {_FOLDERS_LIMIT} are allowed")
    for path in found.folders:
        if "\0" in path or not path.startswith("/") or len(path.encode(errors="replace")) > _PATH_LIMIT:
            raise damaged(f"its settings are none: {path!r:.100} is no absolute path of at most {_PATH_LIMIT} bytes")
    if found.user and (len(found.user) > _USER_LIMIT or not _USER.fullmatch(found.user)):
        raise damaged(f"its settings are none: the user {found.user!r:.100} is neither name, uid, name:group nor uid:gid")
    return found


def _length(text: str, what: str) -> int:
    size = len(text.encode(errors="replace")) + 1
    if "\0" in text or size > _ARGUMENT_LIMIT:
        raise damaged(f"its settings are none: {what} holds a NUL or more than {_ARGUMENT_LIMIT} bytes: {text!r:.100}")
    return size


def configuration_of(settings: ImageSettings) -> Configuration:
    """As a layer has it. A variable without `=` is one that whoever built the image had not set."""
    return Configuration(
        env=dict(text.partition("=")[::2] for text in settings.env or [] if "=" in text),
        workdir=settings.working_dir or "",
        user=settings.user or "",
        entrypoint=settings.entrypoint or [],
        command=settings.cmd or [],
    )
