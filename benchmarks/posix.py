"""POSIX by pjdfstest: in a sandbox, in a sandbox restored from its snapshot, and on the host's own file system.

    python -m benchmarks.posix --suite PATH --environment debian-perl [--host-folder /var/tmp] [--json]

PATH is a checkout of pjdfstest with its program built (autoreconf -ifs, configure, make); none of it is part of this repository. The
environment has perl and openssl. A daemon must be up (`dsec up`). Exit status 1 if a difference is not one of `EXPLAINED`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

__all__ = ["EXPLAINED", "parse", "without_devices"]

DEVICES: Final = "block and character devices cannot be made in a user namespace: mknod gives EPERM"
LINK_COUNTS: Final = "a folder's link count does not tell its subfolders, on btrfs and on overlayfs: always 1"
EXPLAINED: Final = {
    "mknod/02.t": DEVICES,
    "mknod/03.t": DEVICES,
    "mknod/11.t": DEVICES,
    "unlink/00.t": DEVICES,
    "rename/24.t": LINK_COUNTS,
}
"""Test files that may differ from the host's file system, and why."""

_TYPES = re.compile(r"^(\s*for type\w* in .*)$", re.MULTILINE)
_DEVICE = re.compile(r"\s(block|char)\b")
_RESULT = re.compile(r"^(not )?ok (\d+)\b(.*)$", re.MULTILINE)
_FILE = re.compile(r"^(\S*?)(\w+/\d+\.t) \.+", re.MULTILINE)
INSIDE: Final = "/opt/pjdfstest"
COMMAND: Final = "prove --verbose --recurse {suite}/tests"


def without_devices(text: str) -> str:
    """A test's text with the device types taken out of its loops over types: else each later step of the same file fails with the first."""
    return _TYPES.sub(lambda match: _DEVICE.sub("", match[1]), text)


def parse(output: str) -> dict[str, tuple[int, frozenset[int]]]:
    """What `prove --verbose` said: by test file, how many assertions ran and the numbers of those that failed.

    What the suite itself marks TODO for this system is no failure, as it is none for `prove`.
    """
    found: dict[str, tuple[int, frozenset[int]]] = {}
    starts = list(_FILE.finditer(output))
    for start, end in zip(starts, [*(one.start() for one in starts[1:]), len(output)], strict=True):
        results = _RESULT.findall(output, start.end(), end)
        if results:
            found[start[2]] = (len(results), frozenset(int(number) for bad, number, rest in results if bad and "# TODO" not in rest))
    return found


def prepare(suite: Path, target: Path) -> None:
    """A copy of the suite, its loops without devices."""
    if not os.access(suite / "pjdfstest", os.X_OK):
        raise SystemExit(f"{suite} has no built pjdfstest: run autoreconf -ifs, ./configure and make there")
    shutil.copytree(suite, target, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    for file in target.glob("tests/*/*.t"):
        file.write_text(without_devices(file.read_text()))


def on_host(suite: Path, folder: Path) -> str:
    """Run in a new folder below `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        done = subprocess.run(COMMAND.format(suite=suite).split(), cwd=place, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout


async def inside(sandbox: Sandbox, folder: str) -> str:
    """Run in a new folder of the sandbox."""
    command = f"mkdir -p {folder} && cd {folder} && {COMMAND.format(suite=INSIDE)}"
    result = await sandbox.run_shell(command, timeout=3600, output_limit_bytes=64 << 20)
    return result.stdout_text


async def in_sandboxes(suite: Path, environment: str, disk_limit_mb: int) -> dict[str, str]:
    """In a sandbox, then in one that was restored from the first one's snapshot."""
    said: dict[str, str] = {}
    async with DSecClient() as client:
        args = DSecContainerRunArgs(container_image=environment, disk_limit_mb=disk_limit_mb)
        async with await client.run_container(args) as sandbox:
            await sandbox.files.upload_tree(suite, INSIDE)
            said["sandbox"] = await inside(sandbox, "/root/first")
            await sandbox.pack_diff("posix-trial")
        async with await client.restore("posix-trial") as restored:
            said["restored"] = await inside(restored, "/root/second")
    return said


def judge(runs: dict[str, dict[str, tuple[int, frozenset[int]]]], reference: str | None) -> list[dict[str, Any]]:
    """One line for each test file in which a run differs from the reference, or where there is none, fails."""
    differences: list[dict[str, Any]] = []
    for name, results in runs.items():
        if name == reference:
            continue
        expected = runs[reference] if reference else {file: (count, frozenset[int]()) for file, (count, _) in results.items()}
        for file in sorted(expected.keys() | results.keys()):
            if results.get(file) != expected.get(file):
                ran, failed = results.get(file, (0, frozenset[int]()))
                differences.append({"run": name, "file": file, "ran": ran, "failed": len(failed), "why": EXPLAINED.get(file)})
    return differences


def _total(results: dict[str, tuple[int, frozenset[int]]]) -> dict[str, int]:
    failed = sum(len(bad) for _, bad in results.values())
    return {"files": len(results), "ran": sum(ran for ran, _ in results.values()), "failed": failed}


def main() -> int:
    """Run all, print, and say whether each difference is explained."""
    parser = argparse.ArgumentParser(prog="benchmarks.posix", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--suite", type=Path, required=True, help="a built checkout of pjdfstest")
    parser.add_argument("--environment", required=True, help="name of an environment with perl and openssl")
    parser.add_argument("--host-folder", type=Path, help="run it there too, on the host's own file system, as the reference")
    parser.add_argument("--disk-limit-mb", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        suite = Path(work) / "pjdfstest"
        prepare(options.suite, suite)
        said = asyncio.run(in_sandboxes(suite, options.environment, options.disk_limit_mb))
        if options.host_folder is not None:
            said["host"] = on_host(suite, options.host_folder)
    runs = {name: parse(text) for name, text in said.items()}
    differences = judge(runs, "host" if "host" in runs else None)
    totals = {name: _total(results) for name, results in runs.items()}
    if options.json:
        print(json.dumps({"totals": totals, "differences": differences}))
    else:
        table = Table("run", "file", "ran", "failed", "why", box=None, pad_edge=False)
        for one in differences:
            table.add_row(one["run"], one["file"], str(one["ran"]), str(one["failed"]), one["why"] or "[red]not explained[/red]")
        console = Console(highlight=False)
        for name, total in totals.items():
            console.print(f"{name}: {total['ran']} assertions in {total['files']} files, {total['failed']} failed")
        console.print(table)
    return int(any(one["why"] is None for one in differences) or not all(total["ran"] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
