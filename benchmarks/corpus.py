"""The environments that are measured: real images of at least 1 GB, each with a job. Made once from the registries, kept in the cache.

Every image is a Debian root that some others have too, a layer of its own with what its requirements install (no two the same set, many
with some in common), and the source of a real project, with the bytecode that its tests left when the image was built. That is how images
of different tasks come to be: their layers differ, many of their files do not.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from benchmarks.downloads import debian_root, installed_wheel, source_release
from benchmarks.layout import Compression, ImageLayout, LayerBlob
from benchmarks.root import CACHE

__all__ = ["Corpus", "Image", "Job", "made_corpus"]

LEAST_MB: Final = 2000
"""Of the tar streams of one image. Published images have 4 to 12 GB; of this size twenty can be unpacked on a disk of 50 GB."""

ROOTS: Final = {
    "c": ["python3", "git", "build-essential", "cmake"],
    "llvm": ["python3", "git", "clang"],
    "go": ["python3", "git", "golang-go"],
    "jvm": ["python3", "git", "openjdk-17-jdk-headless", "maven"],
}
QUICK_ROOTS: Final = {"small": ["python3"]}

WHEELS: Final = {
    "ansible": "12.3.0",
    "botocore": "1.44.8",
    "catboost": "1.2.10",
    "duckdb": "2.0.1",
    "google-api-python-client": "2.202.0",
    "jaxlib": "0.7.0",
    "kaleido": "0.2.1",
    "llvmlite": "0.50.0",
    "numpy": "2.4.6",
    "opencv-python-headless": "5.0.0.93",
    "pandas": "3.1.1",
    "playwright": "1.65.2",
    "pyarrow": "26.0.1",
    "pyside6-essentials": "6.9.3",
    "ray": "2.60.0",
    "scipy": "1.17.1",
    "tensorflow-cpu": "2.15.1",
    "vtk": "9.7.2",
    "ziglang": "0.17.1",
}
"""Each with the version that is installed."""

LIBRARIES: Final = {
    "duckdb": ("duckdb",),
    "llvmlite.binding": ("llvmlite",),
    "numpy": ("numpy",),
    "pyarrow": ("numpy", "pyarrow"),
    "vtkmodules.vtkCommonDataModel": ("vtk",),
}
"""What a job imports, and the packages that it is in: libraries that load in a tenth of a second, as a burst of 200 has two cores."""

TESTS: Final = [
    ("idna", "3.20", "tests.test_intranges"),
    ("markdown", "3.11.3", "tests.test_syntax.blocks.test_headers"),
    ("mistune", "3.4.0", "tests.test_hooks"),
    ("pycparser", "3.12", "tests.test_c_lexer"),
    ("simplejson", "4.3.0", "simplejson.tests.test_decode"),
    ("docutils", "0.23", "test.test_nodes"),
    ("pyparsing", "3.3.3", "tests.test_simple_unit"),
    ("idna", "3.20", "tests.test_idna_codec"),
    ("markdown", "3.11.3", "tests.test_syntax.blocks.test_code_blocks"),
    ("mistune", "3.4.0", "tests.test_directives"),
    ("pycparser", "3.12", "tests.test_c_ast"),
    ("docutils", "0.23", "test.test_language"),
]
"""A project, its version and one of its test files."""

_JOB = "import sys, unittest; sys.path[:0] = ['src', '.']; import {library}; unittest.main(module=None, argv=['job', '-q', '{test}'])"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in a sandbox of the image: a library is imported, then a project's test file runs. It writes nothing."""

    argv: list[str]
    cwd: str


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """One environment: its name in the layout, layers from the bottom, and its job."""

    name: str
    layers: list[LayerBlob]
    job: Job
    packages: list[str]

    @property
    def tar_bytes(self) -> int:
        """What it is unpacked, by its archives."""
        return sum(layer.tar_bytes for layer in self.layers)


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """All images of one layout."""

    folder: str
    images: list[Image]

    @property
    def layout(self) -> Path:
        """The OCI layout of all images."""
        return Path(self.folder) / "layout"

    def layers(self) -> list[LayerBlob]:
        """Each layer once."""
        return list({layer.digest: layer for image in self.images for layer in image.layers}.values())

    def to_json(self) -> dict[str, object]:
        """Sizes, for the report. MB are 10^6 bytes."""
        layers = self.layers()
        return {
            "images": len(self.images),
            "smallest_image_mb": round(min(image.tar_bytes for image in self.images) / 1e6),
            "all_images_mb": round(sum(image.tar_bytes for image in self.images) / 1e6),
            "distinct_layers": len(layers),
            "distinct_layers_mb": round(sum(layer.tar_bytes for layer in layers) / 1e6),
            "compressed_mb": round(sum(layer.size for layer in layers) / 1e6),
            "compression": layers[0].compression,
        }


def made_corpus(
    count: int, *, quick: bool = False, least_mb: int = LEAST_MB, compression: Compression = "zstd", cache: Path = CACHE
) -> Corpus:
    """`count` images of at least `least_mb`; made if the cache lacks them. `quick`: small ones, which need little of the registries.

    They are the first of a larger number where the cache has that.
    """
    parameters = f"{ROOTS} {QUICK_ROOTS} {WHEELS} {LIBRARIES} {TESTS} {_JOB} sources with bytecode"
    key = hashlib.sha256(parameters.encode()).hexdigest()[:8]
    least_mb = 0 if quick else least_mb
    made = {int(path.name.split("-")[2]): path for path in cache.glob(f"corpus-{least_mb}-*-{compression}-{key}") if _record(path).exists()}
    enough = [number for number in made if number >= count]
    if enough:
        folder = made[min(enough)]
    else:
        for old in cache.glob(f"corpus-{least_mb}-*-{compression}-*"):
            shutil.rmtree(old)
        folder = cache / f"corpus-{least_mb}-{count}-{compression}-{key}"
        folder.mkdir(parents=True)
        images = _make(ImageLayout(folder / "layout"), count, least_mb, compression, cache)
        _record(folder).write_bytes(msgspec.json.format(msgspec.json.encode(images), indent=1))
    return Corpus(folder=str(folder), images=msgspec.json.decode(_record(folder).read_bytes(), type=list[Image])[:count])


def _record(folder: Path) -> Path:
    return folder / "corpus.json"


def _make(layout: ImageLayout, count: int, least_mb: int, compression: Compression, cache: Path) -> list[Image]:
    choices = list((ROOTS if least_mb else QUICK_ROOTS).items())
    roots: dict[str, LayerBlob] = {}
    images: list[Image] = []
    for number in range(count):
        name, packages = choices[number % len(choices)]
        if name not in roots:
            roots[name] = layout.add_layer(_copying(debian_root(name, packages, cache)), compression)
        library, needs = list(LIBRARIES.items())[number % len(LIBRARIES)] if least_mb else ("numpy", LIBRARIES["numpy"])
        project, version, test = TESTS[number % len(TESTS)]
        wanted = least_mb * 1_000_000 - roots[name].tar_bytes
        chosen, trees = _dependencies(number, needs, wanted, cache)
        print(f"making image {number + 1} of {count}: {name}, {', '.join(chosen)}, {project}", file=sys.stderr, flush=True)
        source = source_release(project, version, cache)
        layers = [
            roots[name],
            layout.add_layer(_archiving((tree, "") for tree in trees), compression),
            layout.add_layer(_archiving([(source, f"workspace/{project}")]), compression),
        ]
        job = Job(argv=["python3", "-c", _JOB.format(library=library, test=test)], cwd=f"/workspace/{project}")
        image = Image(name=f"env-{number:02}", layers=layers, job=job, packages=chosen)
        layout.add_image(image.name, layers, {"WorkingDir": job.cwd, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]})
        images.append(image)
    layout.finish()
    return images


def _dependencies(number: int, needs: Sequence[str], wanted: int, cache: Path) -> tuple[list[str], list[Path]]:
    """Packages that the job needs, then others in an order that is this image's own, until there are `wanted` bytes."""
    others = [name for name in WHEELS if name not in needs]
    turn = number * 7 % len(others)
    chosen: list[str] = []
    trees: list[Path] = []
    have = 0
    for name in [*needs, *others[turn:], *others[:turn]]:
        if have >= wanted and name not in needs:
            break
        tree = installed_wheel(name, WHEELS[name], cache, compiled=any(name in packages for packages in LIBRARIES.values()))
        have += sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
        chosen.append(name)
        trees.append(tree)
    return chosen, trees


def _copying(tar: Path) -> Callable[[BinaryIO], None]:
    def copy(stream: BinaryIO) -> None:
        with tar.open("rb") as file:
            shutil.copyfileobj(file, stream, 1 << 20)

    return copy


def _archiving(trees: Iterable[tuple[Path, str]]) -> Callable[[BinaryIO], None]:
    """A tar of folders, each below a prefix, owned by root, in the order of names; folders that several have come once."""

    def write(stream: BinaryIO) -> None:
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:
            seen: set[str] = set()
            for tree, prefix in trees:
                for path in sorted([tree, *tree.rglob("*")]):
                    name = os.path.normpath(f"{prefix}/{path.relative_to(tree)}").strip("/")
                    if name not in ("", ".") and not (path.is_dir() and name in seen):
                        seen.add(name)
                        _add(tar, path, name)

    return write


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    member = tar.gettarinfo(path, name)
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 1_700_000_000
    if member.isreg():
        with path.open("rb") as content:
            tar.addfile(member, content)
    else:
        tar.addfile(member, io.BytesIO())
