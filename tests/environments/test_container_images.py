"""Images in OCI layouts and docker archives: layers applied with their whiteouts, settings kept, digests held to."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from layouts import CONFIGURATION, MACHINE, Layout, file, folder, tar_of, zstd
from trees import describe

from dsec.environments import build
from libdsec.errors import InvalidArgument, NotFound

pytestmark = pytest.mark.root


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "layout")


LAYERS = [
    tar_of(
        folder("etc"), file("etc/keep"), file("etc/gone"),
        folder("opaque"), file("opaque/old"), folder("opaque/sub"), file("opaque/sub/old"),
        folder("usr/lib"), ("lib", tarfile.SYMTYPE, {"linkname": "usr/lib"}, b""), file("lib/a"),
        folder("whole/tree"), file("whole/tree/x"), file(".dot"), file("both", b"lower"),
    ),
    tar_of(
        folder("opaque", mode=0o700), folder("opaque/sub"), file("opaque/sub/new"), file("opaque/new"), file("opaque/.wh..wh..opq", b"x"),
        file("etc/.wh.gone", b"x"), file(".wh.whole", b"x"), file(".wh.absent", b"x"), file("lib/.wh.a", b"x"), file("lib/b"),
        file("both", b"upper"), file(".wh.both", b"x"), ("hard", tarfile.LNKTYPE, {"linkname": "etc/keep"}, b""),
        ("dev/null", tarfile.CHRTYPE, {"devmajor": 1, "devminor": 3, "mode": 0o666}, b""), file("etc/.wh..wh.plnk", b"x"),
    ),
]  # fmt: skip


def mount_base(store, source):
    build(store, "image", source=source)
    return Path(store.acquire(store.resolve(["image"]).digests, "sb-1")[0])


def check_applied(root):
    assert sorted(os.listdir(root / "opaque")) == ["new", "sub"]
    assert os.listdir(root / "opaque/sub") == ["new"]
    assert (root / "opaque").stat().st_mode & 0o777 == 0o700
    assert not (root / "etc/gone").exists()
    assert not (root / "whole").exists()
    assert os.listdir(root / "usr/lib") == ["b"]
    assert (root / "both").read_bytes() == b"upper"
    assert (root / "hard").stat().st_ino == (root / "etc/keep").stat().st_ino
    assert (root / ".dot").exists()
    assert os.major((root / "dev/null").stat().st_rdev) == 1
    assert not [name for _, folders, files in os.walk(root) for name in folders + files if name.startswith(".wh.")]


def test_layers_are_applied_with_their_whiteouts_wherever_these_stand(store, layout):
    check_applied(mount_base(store, f"oci:{layout.image(LAYERS).write()}"))


def test_the_images_settings_become_the_environments(store, layout):
    info = build(store, "image", source=f"oci:{layout.image(LAYERS).write()}")
    resolved = store.resolve(["image"])
    assert resolved.env == {"PATH": "/usr/bin:/bin", "WITH": "a=b", "EMPTY": ""}
    assert (resolved.workdir, resolved.user, resolved.entrypoint) == ("/srv", "app:staff", ["/bin/sh", "-c"])
    assert info.kind == "base"
    # other settings over the same files are another layer
    other = layout.image(LAYERS, configuration={}, name="plain").write()
    assert build(store, "plain", source=f"oci:{other}@plain").digest != info.digest


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_layers_may_be_compressed_in_any_way_and_lack_the_end_mark(store, layout, compress):
    layers = [LAYERS[0], tar_of(file("more"), end=False)]
    root = mount_base(store, f"oci:{layout.image(layers, compress=compress).write()}")
    assert (root / "more").read_bytes() == b"more"


def test_a_layout_may_be_packed_in_a_tar(store, layout, tmp_path):
    subprocess.run(["tar", "-cf", tmp_path / "packed.tar", "-C", layout.image(LAYERS).write(), "."], check=True)
    check_applied(mount_base(store, f"oci:{tmp_path / 'packed.tar'}"))


def test_a_docker_archive_is_applied_alike(store, layout, tmp_path):
    """As `docker save` writes it, with a layer that is a link to the place where an image before it has the same one."""
    layers = [f"{number}/layer.tar" for number in range(len(LAYERS))]
    config = {"config": CONFIGURATION, "rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in LAYERS]}}
    with tarfile.open(tmp_path / "saved.tar", "w") as archive:
        for name, content in (
            ("elsewhere/layer.tar", LAYERS[0]),
            (layers[1], LAYERS[1]),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps([{"Config": "config.json", "RepoTags": ["x:1"], "Layers": layers}]).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo(layers[0])
        link.type, link.linkname = tarfile.SYMTYPE, "../elsewhere/layer.tar"
        archive.addfile(link)
    root = mount_base(store, f"oci:{tmp_path / 'saved.tar'}")
    check_applied(root)
    assert store.resolve(["image"]).workdir == "/srv"
    from_layout = build(store, "layout", source=f"oci:{layout.image(LAYERS).write()}")
    assert from_layout.digest == store.show("image").digest


def test_the_image_of_this_machine_is_taken_from_an_index_within_an_index(store, layout):
    layout.image([tar_of(file("foreign"))], architecture="s390x").image([tar_of(file("ours"))], architecture=MACHINE)
    inner = layout.blob(json.dumps({"manifests": layout.manifests}).encode(), "index.v1+json")
    layout.manifests = [inner]
    root = mount_base(store, f"oci:{layout.write()}")
    assert (root / "ours").exists()


def test_of_several_images_one_must_be_chosen(store, layout):
    path = layout.image([tar_of(file("one"))], name="v1").image([tar_of(file("two"))], name="v2").write()
    with pytest.raises(InvalidArgument, match="several images"):
        build(store, "image", source=f"oci:{path}")
    assert (mount_base(store, f"oci:{path}@v2") / "two").exists()
    with pytest.raises(NotFound):
        build(store, "image", source=f"oci:{path}@v3")


def test_skopeo_and_we_agree(store, layout, tmp_path):
    """An independent reader and writer of both formats."""
    if shutil.which("skopeo") is None:
        pytest.skip("needs skopeo")
    path = layout.image(LAYERS, name="latest").write()
    subprocess.run(
        ["skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{path}:latest", f"docker-archive:{tmp_path / 'd.tar'}:x:1"],
        check=True, capture_output=True,
    )  # fmt: skip
    check_applied(mount_base(store, f"oci:{tmp_path / 'd.tar'}"))


# -- images that lie -----------------------------------------------------------------------------------------------------------------


def spoil_layer(layout):
    manifest = json.loads((layout.path / "blobs/sha256" / layout.manifests[0]["digest"][7:]).read_text())
    (layout.path / "blobs/sha256" / manifest["layers"][1]["digest"][7:]).write_bytes(gzip.compress(tar_of(file("other"))))


def spoil_manifest(layout):
    path = layout.path / "blobs/sha256" / layout.manifests[0]["digest"][7:]
    path.write_text(path.read_text() + " ")


def lose_layer(layout):
    manifest = json.loads((layout.path / "blobs/sha256" / layout.manifests[0]["digest"][7:]).read_text())
    (layout.path / "blobs/sha256" / manifest["layers"][0]["digest"][7:]).unlink()


def point_outside(layout):
    layout.manifests[0]["digest"] = "sha256:../../../../etc/passwd"


def lack_fields(layout):
    layout.manifests[0].pop("digest")


def no_json(layout):
    layout.manifests = [layout.blob(b"{", "manifest.v1+json")]


@pytest.mark.parametrize("spoil", [spoil_layer, spoil_manifest, lose_layer, point_outside, lack_fields, no_json])
def test_an_image_that_is_not_what_it_says_is_refused(store, layout, spoil):
    layout.image(LAYERS)
    spoil(layout)
    with pytest.raises(InvalidArgument) as caught:
        build(store, "image", source=f"oci:{layout.write()}")
    assert (caught.value.field, caught.value.cause) == ("source", "archive")
    assert store.list() == []
    assert os.listdir(store.staging.root) == []


@pytest.mark.parametrize(
    "layer",
    [
        [file("../.wh.x", b"x")], [file(".wh...", b"x")], [file(".wh..", b"x")], [file(".wh.", b"x")], [file("a/../../evil")],
        [("evil", tarfile.LNKTYPE, {"linkname": "/etc/passwd"}, b"")],
    ],
)  # fmt: skip
def test_a_layer_that_reaches_out_is_refused(store, layout, layer):
    with pytest.raises(InvalidArgument):
        build(store, "image", source=f"oci:{layout.image([LAYERS[0], tar_of(*layer)]).write()}")
    assert store.list() == []


def test_a_whiteout_through_a_link_removes_nothing_outside(store, layout, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    first = tar_of(("out", tarfile.SYMTYPE, {"linkname": str(outside)}, b""))
    second = tar_of(file("out/.wh.secret", b"x"), file("out/.wh..wh..opq", b"x"))
    build(store, "image", source=f"oci:{layout.image([first, second]).write()}")
    assert (outside / "secret").read_text() == "secret"


def test_an_image_keeps_what_a_tar_keeps(store, layout, full_tree, tmp_path):
    """But for what hides things of layers below: in a first layer there is nothing to hide."""
    (full_tree / "whiteout").unlink()
    os.removexattr(full_tree / "a/b", "trusted.overlay.opaque")
    os.utime(full_tree, ns=(0, 1_200_000_000_000_000_007))
    packed = subprocess.run(
        ["tar", "-c", "--format=pax", "--xattrs", "--xattrs-include=*", "-C", full_tree, "."], check=True, capture_output=True
    ).stdout
    build(store, "image", source=f"oci:{layout.image([packed], configuration={}).write()}", kind="toolkit")
    build(store, "bare", source=f"tar:{write(tmp_path / 'bare', LAYERS[0])}")
    root = store.acquire(store.resolve(["bare", "image"]).digests, "sb-1")[1]
    assert describe(root) == describe(full_tree)


def write(path, data):
    path.write_bytes(data)
    return path
