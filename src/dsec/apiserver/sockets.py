"""Listening sockets: the Unix one appears complete, with its mode, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from libdsec.errors import Conflict, InvalidArgument

__all__ = ["bind_tcp", "bind_unix", "unlink_own"]

_PATH_BYTES_MAX = 107  # sun_path without its NUL


def bind_unix(path: Path, mode: int = 0o600, backlog: int = 4096) -> socket.socket:
    """A listening socket at `path`. One left by a dead server is replaced; Conflict where a live one answers or the path is no socket.

    Bound under a temporary name and renamed, so that there is no moment at which others could connect to it with a wider mode.
    """
    temporary = path.with_name(f".{path.name[:16]}.{os.getpid()}")
    if max(len(os.fsencode(path)), len(os.fsencode(temporary))) > _PATH_BYTES_MAX:
        raise InvalidArgument(f"{path} is longer than the {_PATH_BYTES_MAX} bytes that a Unix socket's path may have", field="unix_path")
    _refuse_live(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(temporary))
        temporary.chmod(mode)
        listener.listen(backlog)
        listener.setblocking(False)
        temporary.rename(path)
    except BaseException:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    return listener


def _refuse_live(path: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise Conflict(f"{path} exists and is not a socket", field="unix_path", cause="not-a-socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise Conflict(f"{path} may have a live server behind it: {error}", field="unix_path", cause="in-use") from error
    raise Conflict(f"another server already listens on {path}", field="unix_path", cause="in-use")


def bind_tcp(address: str, backlog: int = 4096) -> socket.socket:
    """A listening socket at `host:port` (`[::1]:8080`; port 0 lets the kernel choose)."""
    host, colon, port_text = address.rpartition(":")
    if not colon or not port_text.isdigit() or int(port_text) > 65535:
        raise InvalidArgument(f"{address!r} is not host:port", field="tcp")
    host = host.strip("[]") or "127.0.0.1"
    try:
        family, _, _, _, where = socket.getaddrinfo(host, int(port_text), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise InvalidArgument(f"{host!r}: {error.strerror}", field="tcp") from error
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise Conflict(f"cannot listen on {address}: {error.strerror}", field="tcp", cause="in-use") from error
    return listener


def unlink_own(path: Path, identity: tuple[int, int]) -> None:
    """Remove the socket file at `path` if it still is the one with this (device, inode): a successor's stays."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if (found.st_dev, found.st_ino) == identity:
            path.unlink()
