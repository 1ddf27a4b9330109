"""Files, in both directions."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import tempfile
from pathlib import Path

from dsec.testing.trial import Trial, check, equal, holds, refused
from libdsec.errors import Conflict, DSecError, InvalidArgument, NotFound

__all__: list[str] = []

ROOM = "/tmp/dsec-check"
ODD_NAMES = ["with space", "new\nline", "-dash", "quote'\"", "ünï", ".hidden", "*", "a" * 255]
LARGE_BYTES = 24 << 20


@check()
async def files_are_written_and_read(trial: Trial) -> None:
    files = trial.shared.files
    data = bytes(range(256)) * 100
    await files.write(f"{ROOM}/folder/file", data, mode=0o640, parents=True)
    equal(await files.read(f"{ROOM}/folder/file"), data, "content")
    found = await files.stat(f"{ROOM}/folder/file")
    equal((found.kind, found.size, found.mode, found.uid), ("file", len(data), 0o640, 0), "stat")
    equal((await trial.shell(f"wc -c <{ROOM}/folder/file")).strip(), str(len(data)), "seen inside")
    await files.write(f"{ROOM}/folder/file", b"")
    equal(await files.read(f"{ROOM}/folder/file"), b"", "an empty file")
    await files.remove(ROOM, recursive=True)
    await refused(files.read(f"{ROOM}/folder/file"), NotFound)


@check()
async def odd_names_survive(trial: Trial) -> None:
    files = trial.shared.files
    await files.mkdir(f"{ROOM}-odd")
    for name in ODD_NAMES:
        await files.write(f"{ROOM}-odd/{name}", name.encode())
    listed = {entry.path.rpartition("/")[2] for entry in await files.list(f"{ROOM}-odd")}
    equal(listed, set(ODD_NAMES), "names")
    for name in ODD_NAMES:
        equal(await files.read(f"{ROOM}-odd/{name}"), name.encode(), f"content of {name[:20]!r}")
    await files.remove(f"{ROOM}-odd", recursive=True)


@check()
async def bad_paths_are_refused(trial: Trial) -> None:
    files = trial.shared.files
    await refused(files.read("/etc/pass\0wd"), InvalidArgument, field="path")
    await refused(files.read("relative"), InvalidArgument, field="path")
    await refused(files.read(""), InvalidArgument, field="path")
    await refused(files.write("/no/such/folder/file", b"x"), NotFound)
    await refused(files.read("/etc"), InvalidArgument, Conflict)


@check()
async def links_resolve_in_the_sandbox(trial: Trial) -> None:
    """A link that climbs out of the root, or names an absolute path, means a file of the sandbox's, never of the host's."""
    files = trial.shared.files
    inside = await trial.shell("hostname")
    host = platform.node()
    await files.symlink("../" * 30 + "etc/hostname", "/tmp/climb")
    await files.symlink("/proc/1/root/../../../../etc/hostname", "/tmp/around")
    for link in ("/tmp/climb", "/tmp/around"):
        try:
            seen = (await files.read(link)).decode()
        except DSecError:
            continue
        holds(seen.strip() != host or inside.strip() == host, f"{link} shows the host's file")
    await files.remove("/tmp/climb")
    await files.remove("/tmp/around")
    holds((await trial.shared.run_shell("test -e /etc/hostname || ls /etc")).exit_code == 0, "removing a link leaves its target")


@check()
async def files_move_and_go(trial: Trial) -> None:
    files = trial.shared.files
    await files.mkdir(f"{ROOM}-move/a/b", parents=True)
    await files.write(f"{ROOM}-move/a/b/one", b"1")
    await files.move(f"{ROOM}-move/a", f"{ROOM}-move/c")
    equal(await files.read(f"{ROOM}-move/c/b/one"), b"1", "moved")
    await refused(files.remove(f"{ROOM}-move"), Conflict, InvalidArgument)
    await files.remove(f"{ROOM}-move", recursive=True)
    await refused(files.stat(f"{ROOM}-move"), NotFound)


@check()
async def users_rights_hold(trial: Trial) -> None:
    files = trial.shared.files
    await files.write("/tmp/private", b"secret", mode=0o600)
    result = await trial.shared.run_shell("cat /tmp/private", user="1000")
    holds(result.exit_code != 0, "another user cannot read a private file")
    await files.remove("/tmp/private")


@check()
async def large_files_go_both_ways(trial: Trial) -> None:
    files = trial.shared.files
    with tempfile.TemporaryDirectory(prefix="dsec-check-") as folder:
        here, back = Path(folder, "here"), Path(folder, "back")
        expected = await asyncio.to_thread(_write_random, here)
        await files.upload(here, "/tmp/large")
        equal((await files.stat("/tmp/large")).size, LARGE_BYTES, "size")
        await files.download("/tmp/large", back)
        equal(await asyncio.to_thread(_digest, back), expected, "digest")
    await files.remove("/tmp/large")


def _write_random(path: Path) -> str:
    path.write_bytes(os.urandom(LARGE_BYTES))
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@check()
async def trees_go_both_ways(trial: Trial) -> None:
    files = trial.shared.files
    with tempfile.TemporaryDirectory(prefix="dsec-check-") as folder:
        source, back = Path(folder, "source"), Path(folder, "back")
        await asyncio.to_thread(_make_tree, source)
        await files.upload_tree(source, "/tmp/tree")
        equal((await trial.shell("cat /tmp/tree/sub/.dot; readlink /tmp/tree/link")).split(), ["hidden", "sub/.dot"], "inside")
        await files.download_tree("/tmp/tree", back)
        equal(await asyncio.to_thread(_describe, back), await asyncio.to_thread(_describe, source), "tree")
    await files.remove("/tmp/tree", recursive=True)


def _make_tree(root: Path) -> None:
    (root / "sub/empty").mkdir(parents=True)
    (root / "sub/.dot").write_text("hidden\n")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "link").symlink_to("sub/.dot")


def _describe(root: Path) -> dict[str, tuple[str, int, str]]:
    found: dict[str, tuple[str, int, str]] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", 0, os.readlink(path))
        elif path.is_dir():
            found[name] = ("folder", 0, "")
        else:
            found[name] = ("file", path.stat().st_mode & 0o777, path.read_text())
    return found
