"""Images that the benchmarks make, and the peer that unpacks them."""

from __future__ import annotations

import io
import tarfile
import zipfile

import pytest

from benchmarks.charged import charged
from benchmarks.corpus import Corpus, Image, Job
from benchmarks.downloads import SITE_PACKAGES, unpack_wheel
from benchmarks.eager import EagerNode, unpack_layer
from benchmarks.layout import ImageLayout
from benchmarks.writes import Written, written
from dsec.environments import EnvironmentStore, build


def archive(**files: bytes):
    def write(stream):
        with tarfile.open(fileobj=stream, mode="w|") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

    return write


@pytest.fixture
def corpus(tmp_path):
    layout = ImageLayout(tmp_path / "layout")
    shared = layout.add_layer(archive(base=b"b" * 5000), "zstd")
    images = []
    for number, compression in enumerate(("zstd", "gzip")):
        layers = [shared, layout.add_layer(archive(own=b"%d" % number), compression)]
        layout.add_image(f"image-{number}", layers, {"WorkingDir": "/work"})
        images.append(Image(name=f"image-{number}", layers=layers, job=Job(argv=["true"], cwd="/"), packages=[]))
    layout.finish()
    return Corpus(folder=str(tmp_path), images=images)


def test_a_layer_knows_its_stream(corpus, tmp_path):
    layer = corpus.images[1].layers[1]
    unpack_layer(corpus.layout / layer.path, layer, tmp_path / "tree")
    assert (tmp_path / "tree/own").read_bytes() == b"1"
    assert layer.tar_bytes % 512 == 0
    assert len(corpus.layers()) == 3, "what two images share is one"


@pytest.mark.root
@pytest.mark.slow
def test_an_image_can_be_imported(corpus, tmp_path):
    store = EnvironmentStore(tmp_path / "state", tmp_path / "run", tmp_path / "store")
    for number in (0, 1):
        assert build(store, f"image-{number}", source=f"oci:{corpus.layout}@image-{number}").workdir == "/work"


def test_a_broken_layer_is_an_error(corpus, tmp_path):
    layer = corpus.images[0].layers[0]
    (tmp_path / "broken").write_bytes((corpus.layout / layer.path).read_bytes()[:-20])
    with pytest.raises(RuntimeError, match="ended with"):
        unpack_layer(tmp_path / "broken", layer, tmp_path / "tree")


@pytest.mark.root
@pytest.mark.slow
async def test_the_eager_peer_unpacks_each_layer_once(corpus, tmp_path):
    async with EagerNode.opened(corpus, corpus.layout, tmp_path / "eager") as node:
        roots = [await node.pulled(image) for image in (*corpus.images, corpus.images[0])]
        assert [(root / "own").read_bytes() for root in roots] == [b"0", b"1", b"0"]
        assert all((root / "base").read_bytes() == b"b" * 5000 for root in roots)
        unpacked = [path.name for path in (tmp_path / "eager").iterdir() if not path.name.startswith("root-")]
        assert len(unpacked) == 3
    assert not (tmp_path / "eager").exists()


def test_a_wheel_goes_where_pip_puts_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("some/__init__.py", "")
        wheel.writestr("some-1.data/scripts/tool", "#!/bin/sh\n")
        wheel.writestr("some-1.data/purelib/more.py", "")
        wheel.writestr("some-1.data/data/share/doc", "")
        wheel.writestr("some-1.data/headers/some.h", "")
        wheel.writestr("../outside", "")
    unpack_wheel(tmp_path / "some.whl", tmp_path / "tree")
    found = sorted(str(path.relative_to(tmp_path / "tree")) for path in (tmp_path / "tree").rglob("*") if path.is_file())
    assert found == sorted([f"{SITE_PACKAGES}/some/__init__.py", "usr/local/bin/tool", f"{SITE_PACKAGES}/more.py", "usr/local/share/doc"])
    assert (tmp_path / "tree/usr/local/bin/tool").stat().st_mode & 0o111


@pytest.mark.slow
def test_a_command_is_charged(tmp_path):
    charge = charged(["dd", "if=/dev/zero", f"of={tmp_path}/file", "bs=1M", "count=8", "status=none"], tmp_path)
    assert charge.written_bytes >= 8 << 20
    assert 0 < charge.wall_s <= charge.synced_s
    with pytest.raises(RuntimeError, match="false ended with 1"):
        charged(["false"], tmp_path)


def test_readings_of_writes_overlap():
    change = Written(10, 4).since(Written(1, 1)).plus(Written(1, 0))
    assert (change, change.most, change.least) == (Written(10, 3), 13, 10)
    assert written([]) == Written()
