"""Ways to make an image of a registry's form usable on a node: ours, mkfs.erofs over an unpacked tree, umoci, podman."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.charged import Charge, charged
from benchmarks.corpus import Corpus, Image
from benchmarks.layout import decompressor
from benchmarks.peers import PeerUnavailable
from benchmarks.peers.base import which

__all__ = ["OURS", "PEER_IMPORTS", "Importer", "emptied", "import_ours", "stored_bytes"]

Importer = Callable[[Corpus, Image, Path], tuple[Charge, int]]
"""Import one image into the empty folder; what it takes, and the bytes that then lie on the disk."""

OURS = "dsec.environments.build(source=oci:...): a stream of each layer to packs and one EROFS image, in a process of its own"
_IMPORT = """
import sys
from pathlib import Path
from dsec.environments import EnvironmentStore, build
state, run, store, source, *names = sys.argv[1:]
environments = EnvironmentStore(Path(state), Path(run), Path(store))
for name in names:
    build(environments, name, source=f"{source}@{name}")
"""


def import_ours(corpus: Corpus, *images: Image, folder: Path) -> Charge:
    """Into a store in `folder`, which may hold others already."""
    places = [str(folder / name) for name in ("state", "run", "store")]
    argv = [sys.executable, "-c", _IMPORT, *places, f"oci:{corpus.layout}", *(image.name for image in images)]
    return charged(argv, folder)


def _mkfs(corpus: Corpus, image: Image, folder: Path) -> tuple[Charge, int]:
    """Layers untarred over one another (these have no whiteouts), then mkfs.erofs with the data apart, then the digests of both files."""
    tree, metadata, data = folder / "tree", folder / "metadata.erofs", folder / "data.blob"
    tree.mkdir()
    commands = ["set -e -o pipefail"]
    for layer in image.layers:
        unpack = shlex.join([which("tar"), "-C", str(tree), "--numeric-owner", "-xf", "-"])
        commands.append(f"{shlex.join(decompressor(layer.compression))} < {shlex.quote(str(corpus.layout / layer.path))} | {unpack}")
    commands.append(
        shlex.join(
            [which("mkfs.erofs"), "--quiet", "--preserve-mtime", "-x1", "--chunksize=4096", f"--blobdev={data}", str(metadata), str(tree)]
        )
    )
    commands.append(shlex.join(["sha256sum", str(metadata), str(data)]))
    commands.append(shlex.join(["rm", "-rf", str(tree)]))
    return charged([which("bash"), "-c", "\n".join(commands)], folder), stored_bytes(folder)


def _umoci(corpus: Corpus, image: Image, folder: Path) -> tuple[Charge, int]:
    if image.layers[0].compression == "zstd":
        raise PeerUnavailable("umoci of Debian 12 reads no zstd")
    argv = [which("umoci"), "unpack", "--image", f"{corpus.layout}:{image.name}", str(folder / "bundle")]
    return charged(argv, folder), stored_bytes(folder)


def _podman(corpus: Corpus, image: Image, folder: Path) -> tuple[Charge, int]:
    storage = [
        "--root",
        str(folder / "root"),
        "--runroot",
        str(folder / "run"),
        "--tmpdir",
        str(folder / "tmp"),
        "--events-backend",
        "none",
    ]
    podman = [which("podman"), *storage]
    try:
        return charged([*podman, "pull", "--quiet", f"oci:{corpus.layout}:{image.name}"], folder), stored_bytes(folder)
    finally:
        charged([*podman, "rmi", "--all", "--force"], folder)


PEER_IMPORTS: dict[str, tuple[Importer, str]] = {
    "mkfs_erofs": (
        _mkfs,
        "tar -x of each layer into one tree, mkfs.erofs --chunksize=4096 --blobdev, sha256sum of both files, the tree removed",
    ),
    "umoci": (_umoci, "umoci unpack: a tree of files, nothing shared between images"),
    "podman": (_podman, "podman pull oci:LAYOUT:NAME into storage of its own: a tree of files a layer"),
}
"""Name to how it is done, and in words."""


def stored_bytes(folder: Path) -> int:
    """What the files below take on the disk, each inode once."""
    seen: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        found = path.lstat()
        seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def emptied(folder: Path) -> Path:
    """The folder, there and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
