"""Gets the two releases' source archives: pip downloads them once, their hashes are checked at every use."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from .task import Release

__all__ = ["ReleaseError", "fetch", "unpack"]

_DOWNLOAD_SECONDS = 170


class ReleaseError(Exception):
    """A release could not be had, or is not the one that was pinned."""


async def fetch(release: Release, cache: Path) -> Path:
    """The path of the release's archive in `cache`, downloaded with pip if it is not there. Raises `ReleaseError`.

    A download goes into a folder of its own and is renamed into place, so that an interrupted one leaves no half archive behind.
    """
    archive = cache / f"{release.folder}.tar.gz"
    if not await asyncio.to_thread(_is_pinned, archive, release.sha256):
        await asyncio.to_thread(cache.mkdir, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
            await _pip_download(release, Path(folder))
            downloaded = Path(folder) / archive.name
            if not await asyncio.to_thread(_is_pinned, downloaded, release.sha256):
                raise ReleaseError(f"{release.folder}: the downloaded archive is not the pinned one")
            downloaded.rename(archive)
    return archive


def unpack(archive: Path, release: Release, parent: Path) -> Path:
    """Unpack into `parent` and return the project's root there; what was there before is replaced.

    Folders and files only, and only below the release's own folder. Not by tarfile's filters: Debian 12's Python has none yet.
    """
    root = parent / release.folder
    shutil.rmtree(root, ignore_errors=True)
    parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if parts[:1] != (release.folder,) or ".." in parts or not (member.isdir() or member.isreg()):
                raise ReleaseError(f"{archive.name}: {member.name} is no folder or file below {release.folder}")
            target = parent.joinpath(*parts)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None, "a regular member has content"
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
    if not root.is_dir():
        raise ReleaseError(f"{archive.name} has no folder {release.folder}")
    return root


async def _pip_download(release: Release, folder: Path) -> None:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{release.project}=={release.version} --hash=sha256:{release.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", release.project]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(requirement)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"},
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _DOWNLOAD_SECONDS)
    except TimeoutError:
        raise ReleaseError(f"{release.folder}: no download within {_DOWNLOAD_SECONDS} s") from None
    finally:
        if process.returncode is None:
            # pip runs build back ends of its own; the session goes with it.
            os.killpg(process.pid, 9)
            await process.wait()
    if process.returncode:
        raise ReleaseError(f"{release.folder}: pip failed: {output.decode(errors='replace')[-2000:]}")


def _is_pinned(archive: Path, sha256: str) -> bool:
    try:
        with archive.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False
