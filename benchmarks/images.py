"""Images as others' tools write them, that share Debian packages: `python -m benchmarks.images` tells how much of their bytes is stored.

Six are packages over one base layer, made as a Dockerfile's `RUN apt-get install` makes them (umoci unpacks, apt installs, umoci packs the
difference). Four are bootstrapped each by itself, so that they share no layer but many files. Packages are downloaded once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.downloads import debian_root
from benchmarks.root import CACHE
from dsec.environments import EnvironmentStore, build

__all__ = ["BASE", "OVER_BASE", "WHOLE", "made_images", "sharing"]

BASE: Final = ["ca-certificates", "python3"]
OVER_BASE: Final = {
    "git": ["git", "make"],
    "c": ["build-essential"],
    "c-git": ["build-essential", "git", "cmake"],
    "numpy": ["python3-numpy", "python3-pytest"],
    "scipy": ["python3-scipy", "python3-pytest", "git"],
    "node": ["nodejs", "git"],
}
WHOLE: Final = {
    "w-c": ["ca-certificates", "python3", "build-essential"],
    "w-scipy": ["ca-certificates", "python3", "python3-scipy", "build-essential"],
    "w-node": ["ca-certificates", "nodejs", "git", "python3"],
    "w-jvm": ["ca-certificates", "python3", "git", "openjdk-17-jre-headless"],
}
_MB: Final = 1e6


def _run(*argv: str | Path, **options: Any) -> None:
    done = subprocess.run([str(word) for word in argv], check=False, capture_output=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} failed with {done.returncode}: {(done.stderr or done.stdout).decode(errors='replace')[-2000:]}")


def made_images(cache: Path = CACHE) -> tuple[Path, list[str]]:
    """An OCI layout with all images, and their tags. Made once."""
    layout = cache / "images" / "layout"
    tags = [*OVER_BASE, *WHOLE]
    if not layout.exists():
        roots = {"base": BASE, **WHOLE}
        tars = {tag: debian_root(f"image-{tag}", packages, cache) for tag, packages in roots.items()}
        layout.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=layout.parent) as work:
            made = Path(work) / "layout"
            _run("umoci", "init", "--layout", made)
            for tag, tar in tars.items():
                _add_root(made, tag, tar, Path(work))
            for tag, packages in OVER_BASE.items():
                _add_packages(made, tag, packages, Path(work), cache)
            made.rename(layout)
    return layout, tags


def _add_root(layout: Path, tag: str, tar: Path, work: Path) -> None:
    bundle = work / "bundle"
    _run("umoci", "new", "--image", f"{layout}:{tag}")
    _run("umoci", "unpack", "--image", f"{layout}:{tag}", bundle)
    _run("tar", "-x", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-C", bundle / "rootfs", "-f", tar)
    _run("umoci", "repack", "--image", f"{layout}:{tag}", bundle)
    shutil.rmtree(bundle)


def _add_packages(layout: Path, tag: str, packages: list[str], work: Path, cache: Path) -> None:
    print(f"making an image with {', '.join(packages)}, once", file=sys.stderr, flush=True)
    bundle = work / "bundle"
    archives = cache / "archives"
    archives.mkdir(exist_ok=True)
    _run("umoci", "unpack", "--image", f"{layout}:base", bundle)
    root = bundle / "rootfs"
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    keep = ["-o", "Binary::apt-get::APT::Keep-Downloaded-Packages=true", "-o", "Acquire::Languages=none"]
    install = ["apt-get", *keep, "-y", "-qq", "--no-install-recommends", "install", *packages]
    script = f"mount --bind {archives} {root}/var/cache/apt/archives && mount -t proc proc {root}/proc && " + " && ".join(
        f"chroot {root} {line}" for line in ("apt-get -qq update", " ".join(install), "rm -rf /var/lib/apt/lists")
    )
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    _run("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--", "sh", "-c", script, env=environment)
    _run("umoci", "repack", "--image", f"{layout}:{tag}", bundle)
    shutil.rmtree(bundle)


def sharing(layout: Path, tags: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """All images into one new store below `folder`, one after another; after each, what the store holds."""
    environments = EnvironmentStore(folder / "state", folder / "run")
    logical = 0
    for tag in tags:
        started = time.monotonic()
        info = build(environments, tag, source=f"oci:{layout}@{tag}")
        logical += info.logical_bytes
        stored = sum(path.stat().st_blocks * 512 for path in (folder / "state/store").rglob("*") if path.is_file())
        yield {
            "image": tag,
            "seconds": round(time.monotonic() - started, 2),
            "layers": int(info.provenance["layers"]),
            "layers_known": int(info.provenance["layers_known"]),
            "logical_mb": round(info.logical_bytes / _MB, 1),
            "new_mb": round(info.stored_bytes / _MB, 1),
            "logical_mb_so_far": round(logical / _MB, 1),
            "stored_mb_so_far": round(stored / _MB, 1),
            "stored_to_logical": round(stored / logical, 3),
        }


if __name__ == "__main__":
    where, names = made_images()
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as place:
        for row in sharing(where, names, Path(place)):
            print(json.dumps(row), flush=True)
