"""Images from registries, through skopeo: what the store has already, by the digest of its tar, is not fetched."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.environments.publish import import_of
from dsec.environments.sources.imagefiles import INDEXES, blob_path, machine_architecture, proper_digest
from dsec.environments.sources.refusals import damaged
from dsec.environments.sources.workbench import Workbench
from dsec.environments.tools import leashed, tool_version
from libdsec.errors import Denied, DSecError, InvalidArgument, NotFound, QuotaExceeded

__all__ = ["RegistryOptions", "pulled"]

_REFERENCE: Final = re.compile(
    r"//[A-Za-z0-9][A-Za-z0-9._-]*(?::\d+)?(?:/[A-Za-z0-9._-]+)*(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?", re.ASCII
)
_LOOK_SECONDS: Final = 0.2
_BLOB_LIMIT: Final = 1 << 42
_DISK_SHARE: Final = 0.9
"""Of what the disk has left an image may take so much while it is read."""
_SAID_LIMIT: Final = 2000
_DENIED: Final = ("unauthorized", "authentication required", "denied", "invalid username/password")
_MISSING: Final = ("manifest unknown", "name unknown", "not found", "404")
_UNREACHABLE: Final = (
    "no such host", "connection refused", "i/o timeout", "network is unreachable", "no route to host", "timeout", "connection reset",
    "x509:", "tls:", "server gave HTTP response to HTTPS client", "Temporary failure in name resolution", "server misbehaving", "EOF",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """How a registry is spoken to. `authfile`: credentials as `podman login` and `docker login` write them; else skopeo's own default."""

    authfile: Path | None = None
    tls_verify: bool = True


@contextlib.contextmanager
def pulled(
    argument: str, options: RegistryOptions, bench: Workbench, progress: Callable[[int, int], None]
) -> Iterator[tuple[Path, dict[str, str]]]:
    """An OCI layout of the image `//HOST/NAME[:TAG][@DIGEST]` for this machine, and where it came from.

    Layers that the store has are only placeholders in it. Raises NotFound, Denied, Unsupported(cause="tool-missing") without skopeo, and
    DSecError(cause="registry-unreachable").
    """
    if not _REFERENCE.fullmatch(argument):
        raise InvalidArgument(f"source: 'docker:{argument:.300}' is no docker://HOST/NAME[:TAG][@sha256:DIGEST]", field="source")
    name = "docker:" + argument
    if options.authfile is not None and not options.authfile.is_file():
        raise NotFound(f"authfile: {options.authfile} does not exist", field="authfile")
    raw = _inspect(["--raw", name], options)
    digest = "sha256:" + hashlib.sha256(raw).hexdigest()
    manifest = _decoded(raw)
    if manifest.get("mediaType") in INDEXES or "manifests" in manifest:
        digest = _chosen(manifest, argument)
    pinned = f"{_without_version(name)}@{digest}"
    layout = bench.scratch / "pulled"
    room = int(shutil.disk_usage(bench.scratch).free * _DISK_SHARE)
    total = _prepare(layout, raw if pinned == name else _inspect(["--raw", pinned], options), pinned, options, bench)
    if total > room:
        raise _no_room(name)

    def tell(done: int) -> None:
        if done > room:  # it said less
            raise _no_room(name)
        progress(done, total)

    _copy(pinned, layout, options, tell)
    yield layout, {"pulled": f"{name.removeprefix('docker://')}", "pulled_digest": digest, "tool": tool_version("skopeo")}


def _no_room(name: str) -> QuotaExceeded:
    return QuotaExceeded(f"source: {name} takes more than the disk has", field="source", cause="disk", ran="ran")


def _without_version(name: str) -> str:
    name = name.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return head + slash + last.partition(":")[0]


def _chosen(index: dict[str, Any], argument: str) -> str:
    machine = machine_architecture()
    try:
        for one in index.get("manifests") or []:
            where = one.get("platform") or {}
            if (where.get("os"), where.get("architecture")) == ("linux", machine):
                return proper_digest(one["digest"])
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(f"its index is none: {type(error).__name__} {error}") from error
    raise NotFound(f"source: docker:{argument} has nothing for linux/{machine} ({platform.machine()})", field="source")


def _prepare(layout: Path, raw: bytes, name: str, options: RegistryOptions, bench: Workbench) -> int:
    """Put placeholders where the store knows what the blobs become: skopeo fetches no blob that is there. Returns the bytes to fetch."""
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    settings = _decoded(_inspect(["--config", "--raw", name], options))
    total = 0
    try:
        layers = _decoded(raw).get("layers") or []
        for layer, diff_id in zip(layers, settings["rootfs"]["diff_ids"], strict=True):
            blob = layout / blob_path(layer["digest"])
            size, known = int(layer["size"]), proper_digest(diff_id)
            if not 0 <= size <= _BLOB_LIMIT:
                raise damaged(f"a layer of {size} bytes")
            if import_of(bench.layers, known) is None:
                total += size
                continue
            bench.promised.add(known)
            if not blob.exists():
                with blob.open("xb") as file:
                    file.truncate(size)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged(f"its documents lack something: {type(error).__name__} {error}") from error
    return total


def _options(options: RegistryOptions, prefix: str) -> list[str]:
    words = [f"--{prefix}tls-verify={'true' if options.tls_verify else 'false'}"]
    return [*words, f"--{prefix}authfile={options.authfile}"] if options.authfile is not None else words


def _inspect(arguments: list[str], options: RegistryOptions) -> bytes:
    words = leashed(["skopeo", "inspect", *_options(options, ""), *arguments])
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        raise _failure(arguments[-1], done.returncode, done.stderr)
    return done.stdout


def _copy(name: str, layout: Path, options: RegistryOptions, tell: Callable[[int], None]) -> None:
    """Watched by what it has written, as it says nothing to who is no terminal."""
    before = _written(layout)
    words = leashed(["skopeo", "copy", "--quiet", *_options(options, "src-"), name, f"oci:{layout}:pulled"])
    with (layout.parent / "skopeo.log").open("w+b") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_LOOK_SECONDS)
                    break
                tell(max(0, _written(layout) - before))
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise _failure(name, process.returncode, log.read())


def _written(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(f"what the registry gave is no JSON object: {error}") from error


def _failure(name: str, code: int, stderr: bytes) -> DSecError:
    said = stderr.decode(errors="replace").strip()[-_SAID_LIMIT:]
    if any(text in said for text in ("No space left on device", "no space left on device", "quota exceeded")):
        return QuotaExceeded(f"the disk is full: skopeo: {said}", cause="disk", ran="ran")
    if any(text in said for text in _DENIED):
        return Denied(f"source: the registry does not give {name}: {said}", field="source", cause="registry")
    if any(text in said for text in _MISSING):
        return NotFound(f"source: the registry has no {name}: {said}", field="source")
    if any(text in said for text in _UNREACHABLE):
        return DSecError(
            f"source: the registry of {name} cannot be reached: {said}", field="source", cause="registry-unreachable", ran="not-run"
        )
    return DSecError(f"source: skopeo failed with {code} on {name}: {said}", field="source", cause="tool-failed", ran="ran")
