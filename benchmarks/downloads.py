"""Real software for the environments that are measured: Debian roots, wheels and source releases, got once and kept in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from dsec.environments.sources.debian import choose_mirrors, configured_mirrors

__all__ = ["SITE_PACKAGES", "SUITE", "debian_root", "installed_wheel", "source_release", "unpack_wheel"]

SUITE = "bookworm"
PYTHON = "3.11"
"""Of that suite."""
SITE_PACKAGES = f"usr/local/lib/python{PYTHON}/dist-packages"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux1_x86_64", "any")


def debian_root(name: str, packages: Sequence[str], cache: Path) -> Path:
    """A tar of a minimal system with `packages`, made by mmdebstrap as bases are."""
    target = cache / "roots" / f"{name}.tar"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"making a root of {SUITE} with {', '.join(packages)}, once", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        partial = Path(work) / "root.tar"
        argv = ["unshare", "--mount", "--propagation=slave", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"]
        argv += ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--skip=check/empty"]
        argv += ["--aptopt=Acquire::Languages none", f"--include={','.join(packages)}", SUITE, str(partial)]
        argv += [mirror.line for mirror in choose_mirrors(configured_mirrors(), SUITE)]
        _run(argv, {"TMPDIR": work})
        partial.rename(target)
    return target


def _pip_download(what: Sequence[str], target: Path, found: str) -> Path:
    """The one file named `found`-something in `target`, downloaded if it is not there."""
    target.mkdir(parents=True, exist_ok=True)
    if not (files := sorted(target.glob(found))):
        with tempfile.TemporaryDirectory(dir=target) as work:
            _run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", work, *what], {})
            for file in Path(work).glob(found):
                file.rename(target / file.name)
        files = sorted(target.glob(found))
    if len(files) != 1:
        raise RuntimeError(f"{len(files)} files match {found} in {target}")
    return files[0]


def source_release(name: str, version: str, cache: Path) -> Path:
    """The folder of a project's source release, tests and all, unpacked, with its bytecode: an image for a project's tests is built by
    running them in it."""
    plain = name.replace("-", "_")
    archive = _pip_download(["--no-binary", name, f"{name}=={version}"], cache / "sdists", f"{plain}-{version}.tar.gz")
    target = cache / "projects" / f"{plain}-{version}-compiled"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            _run(["tar", "-C", work, "--no-same-owner", "-xf", str(archive)], {})
            tree = Path(work) / f"{plain}-{version}"
            _compile(tree, f"/workspace/{name}")
            tree.rename(target)
    return target


def installed_wheel(name: str, version: str, cache: Path, *, compiled: bool) -> Path:
    """A folder that holds the wheel's files where pip would install them, below a system's root; with its bytecode if `compiled`."""
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    what = ["--only-binary", ":all:", "--python-version", PYTHON, *platforms, f"{name}=={version}"]
    archive = _pip_download(what, cache / "wheels", f"{name.replace('-', '_')}-{version}-*.whl")
    target = cache / "installed" / f"{archive.stem}{'-compiled' if compiled else ''}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            tree = Path(work) / "tree"
            unpack_wheel(archive, tree)
            if compiled:
                _compile(tree, "/")
            tree.rename(target)
    return target


def _compile(tree: Path, place: str) -> None:
    """Bytecode beside every source. Named as at `place` in the sandbox and checked by nothing: files in a layer have other times."""
    options = ["-q", "-f", "--invalidation-mode", "unchecked-hash", "-s", str(tree), "-p", place]
    subprocess.run([sys.executable, "-m", "compileall", *options, str(tree)], check=False, stdout=subprocess.DEVNULL)


def unpack_wheel(archive: Path, tree: Path) -> None:
    """As the wheel's format has it (PEP 427): what lies in `NAME.data/SCHEME/` goes to that scheme's place, all else to site-packages."""
    places = {"purelib": SITE_PACKAGES, "platlib": SITE_PACKAGES, "data": "usr/local", "scripts": "usr/local/bin"}
    with zipfile.ZipFile(archive) as wheel:
        for entry in wheel.infolist():
            top, _, rest = entry.filename.partition("/")
            place = SITE_PACKAGES
            name = entry.filename
            if top.endswith(".data"):
                scheme, _, name = rest.partition("/")
                if (place := places.get(scheme, "")) == "":
                    continue
            path = tree / place / name
            if entry.is_dir() or ".." in path.parts:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(entry) as content, path.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            executable = entry.external_attr >> 16 & 0o111 or place == "usr/local/bin"
            path.chmod(0o755 if executable else 0o644)


def _run(argv: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {done.stderr[-500:]}")
