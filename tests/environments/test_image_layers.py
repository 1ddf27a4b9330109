"""Layers of images over each other: what a layer leaves open, what is shared, what becomes one layer and what stays apart."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from layouts import Layout, file, folder, tar_of, zstd
from trees import describe

from dsec.environments import build
from libdsec.errors import InvalidArgument, NotFound

pytestmark = pytest.mark.root

SYM, LINK = tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "layout")


def symlink(name, target):
    return (name, SYM, {"linkname": target}, b"")


def hard_link(name, target):
    return (name, LINK, {"linkname": target}, b"")


def mount(store, name, tmp_path):
    """The environment as a sandbox sees it: its layers in an overlay, or the one that there is."""
    paths = store.acquire(store.resolve([name]).digests, f"sb-{name}")
    if len(paths) == 1:
        yield Path(paths[0])
        return
    target = tmp_path / f"over-{name}"
    target.mkdir()
    subprocess.run(["mount", "-t", "overlay", "none", target, "-o", "ro,lowerdir=" + ":".join(reversed(paths))], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.fixture
def both(store, layout, tmp_path):
    """Builds the image of some layers twice, as one layer and as many, and gives the two roots."""
    roots = []

    def build_both(*layers, configuration=None):
        path = layout.image([tar_of(*layer) for layer in layers], configuration=configuration or {}).write()
        one = build(store, "one", source=f"oci:{path}")
        many = build(store, "many", source=f"oci:{path}", collapse_below=0)
        assert not one.below
        assert len(many.below) == len(layers) - 1
        for name in ("one", "many"):
            mounted = mount(store, name, tmp_path)
            roots.append(mounted)
            yield next(mounted)

    yield build_both
    for mounted in roots:
        next(mounted, None)


def same(one, many):
    """Names of one file are checked apart: overlayfs gives a file of a lower layer and its other name in an upper one two inodes."""
    first, second = describe(one), describe(many)
    assert {path: facts[:7] for path, facts in first.items()} == {path: facts[:7] for path, facts in second.items()}
    return first


def test_a_folder_that_a_layer_only_names_stays_as_it_is(both):
    """As bazel, ko and jib write layers."""
    one, many = both(
        [folder("tmp", mode=0o1777, mtime=5), folder("home/me", mode=0o700, uid=1000, gid=1001), file("etc/passwd")],
        [file("tmp/x"), file("home/me/.profile"), file("new/deep/y")],
    )
    tree = same(one, many)
    assert tree["tmp"][1] == 0o1777
    assert tree["home/me"][1:4] == (0o700, 1000, 1001)
    assert tree["new"][1:4] == (0o755, 0, 0)
    assert tree["tmp/x"][0]


def test_what_goes_through_a_link_below_lands_where_that_leads(both):
    one, many = both(
        [folder("usr/lib", mode=0o711), symlink("lib", "usr/lib"), symlink("lib64", "/lib"), file("usr/lib/old"), file("usr/lib/gone")],
        [file("lib/a"), file("lib64/b"), file("lib/.wh.gone", b"x"), folder("usr/lib/sub"), file("lib64/sub/c")],
        [file("lib/.wh.nothing", b"x"), file("absent/.wh.x", b"x"), file("lib64/sub/d"), hard_link("lib64/again", "lib64/b")],
    )
    tree = same(one, many)
    assert sorted(os.listdir(one / "usr/lib")) == ["a", "again", "b", "old", "sub"]
    assert sorted(os.listdir(one / "usr/lib/sub")) == ["c", "d"]
    assert os.readlink(one / "lib") == "usr/lib"
    assert tree["usr/lib"][1] == 0o711
    assert not (one / "absent").exists()


def test_a_hard_link_to_a_file_of_a_lower_layer_is_one_file_with_it(both):
    one, many = both(
        [folder("etc", mode=0o700), file("etc/keep", b"k" * 5000, mode=0o640), file("b"), hard_link("a", "b")],
        [hard_link("hard", "etc/keep"), hard_link("third", "hard"), hard_link("fourth", "a")],
    )
    same(one, many)
    for root in (one, many):
        assert len({(root / name).stat().st_ino for name in ("hard", "third", "etc/keep")}) == 1
        assert (root / "etc").stat().st_mode & 0o777 == 0o700
    assert len({(one / name).stat().st_ino for name in ("a", "b", "fourth")}) == 1


def test_whiteouts_and_opaque_folders_hide_across_layers_that_stay_apart(both):
    one, many = both(
        [
            folder("d/e"),
            file("d/e/f"),
            file("d/x"),
            folder("o"),
            file("o/1"),
            file("file"),
            file("twice"),
            folder("again"),
            file("again/old"),
        ],
        [
            file(".wh.d", b""),
            folder("o", mode=0o711),
            file("o/.wh..wh..opq", b""),
            file("o/2"),
            file(".wh.file", b""),
            file(".wh.twice", b""),
        ],
        [folder("d"), file("d/new"), file("twice", b"back"), file(".wh.again", b""), file("again/young")],
    )
    same(one, many)
    assert os.listdir(many / "d") == ["new"]
    assert os.listdir(many / "o") == ["2"]
    assert os.listdir(many / "again") == ["young"]
    assert not (many / "file").exists()
    assert (many / "twice").read_bytes() == b"back"


def test_whiteouts_are_for_the_layers_below_and_know_no_links_of_their_own(both):
    one, many = both(
        [folder("lib"), file("lib/x"), file("usr/lib/x"), file("usr/lib/y"), folder("was/full"), symlink("up", "usr/lib")],
        [
            symlink("lib", "usr/lib"), file("lib/.wh.x"),  # of the folder that was here, not of where the link leads
            file("was", b"file"), folder("was"), file("was/new"),  # the file had hidden what was there
            file("up/.wh.y"), file("usr/lib/y", b"kept"),  # by another way the same place: the layer's own file stays
            file(".wh.gone"), file("gone/deep/.wh.x"), file("never/.wh.x"),
        ],
    )  # fmt: skip
    same(one, many)
    assert sorted(os.listdir(one / "usr/lib")) == ["x", "y"]
    assert (one / "usr/lib/y").read_bytes() == b"kept"
    assert os.listdir(one / "was") == ["new"]
    assert not (one / "gone").exists()
    assert not (one / "never").exists()


def test_an_opaque_root_hides_all_that_is_below(both):
    one, many = both(
        [file("a"), folder("d"), file("d/old")],
        [file(".wh..wh..opq", b""), file("b"), file("d/young")],
    )
    same(one, many)
    assert not (many / "a").exists()
    assert os.listdir(many / "d") == ["young"]


@pytest.mark.slow
def test_two_hundred_layers_are_one(store, layout, tmp_path):
    layers = [
        tar_of(folder("d"), file("d/count", b"%d" % number), file(f"d/{number}"), file(f"d/.wh.{number - 2}", b"")) for number in range(200)
    ]
    info = build(store, "image", source=f"oci:{layout.image(layers).write()}")
    assert not info.below
    root = next(mount(store, "image", tmp_path))
    assert sorted(os.listdir(root / "d")) == ["198", "199", "count"]
    assert (root / "d/count").read_bytes() == b"199"


def test_a_layer_is_read_once_whatever_images_have_it(store, layout, tmp_path):
    base, top, other = (tar_of(file(name, os.urandom(20_000))) for name in ("base", "top", "other"))
    first = build(store, "first", source=f"oci:{layout.image([base, top]).write()}")
    assert (first.provenance["layers"], first.provenance["layers_known"]) == ("2", "0")
    second = Layout(tmp_path / "second").image([base, other, other, base])
    for number in (0, 3):
        (second.path / "blobs/sha256" / second.layers_of(0)[number]["digest"][7:]).unlink(missing_ok=True)
    info = build(store, "second", source=f"oci:{second.write()}")
    assert (info.provenance["layers"], info.provenance["layers_known"]) == ("4", "3")
    assert info.stored_bytes == 20_480
    assert info.data_bytes == 2 * 20_480


def test_layers_become_one_up_to_a_size(store, layout):
    layers = [tar_of(file(str(number), os.urandom(40_000))) for number in range(5)]
    info = build(store, "image", source=f"oci:{layout.image(layers).write()}", collapse_below=90_000)
    assert len(info.below) == 2
    resolved = store.resolve(["image"])
    assert [layer.digest for layer in resolved.layers] == [*info.below, info.digest]
    assert resolved.env["WITH"] == "a=b"
    with pytest.raises(InvalidArgument) as caught:
        build(store, "image", source=f"oci:{layout.path}", collapse_below=-1)
    assert caught.value.field == "collapse_below"


# -- what the image says of itself -------------------------------------------------------------------------------------------------


def test_volumes_and_the_working_directory_exist(store, layout, tmp_path):
    configuration = {
        "Volumes": {"/data": {}, "/var/lib/db": {}, "/link/inner": {}, "/odd/../x": {}, "/file/below": {}},
        "WorkingDir": "/srv/app",
    }
    members = [folder("var", mode=0o700), folder("data", mode=0o750, uid=7), symlink("link", "/var"), file("file")]
    build(store, "image", source=f"oci:{layout.image([tar_of(*members)], configuration=configuration).write()}")
    root = next(mount(store, "image", tmp_path))
    assert (root / "data").stat().st_mode & 0o777 == 0o750
    assert (root / "data").stat().st_uid == 7
    assert (root / "var/lib/db").is_dir()
    assert (root / "var/inner").is_dir()
    assert (root / "srv/app").is_dir()
    assert (root / "var").stat().st_mode & 0o777 == 0o700
    assert not (root / "x").exists()


def test_entrypoint_command_and_user_are_told(store, layout):
    configuration = {"Entrypoint": ["/bin/serve"], "Cmd": ["--port", "80"], "User": "1000:1000"}
    info = build(store, "image", source=f"oci:{layout.image([tar_of(file('x'))], configuration=configuration).write()}")
    assert (info.entrypoint, info.command, info.user) == (["/bin/serve"], ["--port", "80"], "1000:1000")
    resolved = store.resolve(["image"])
    assert (resolved.entrypoint, resolved.command) == (["/bin/serve"], ["--port", "80"])
    other = layout.image([tar_of(file("x"))], configuration={"Env": 7}, name="bad").write()
    with pytest.raises(InvalidArgument):
        build(store, "bad", source=f"oci:{other}@bad")


def edit(layout, change):
    """Change the manifest of the only image."""
    path = layout.path / "blobs/sha256" / layout.manifests[0]["digest"][7:]
    manifest = json.loads(path.read_text())
    change(manifest)
    layout.manifests = [layout.blob(json.dumps(manifest).encode(), "manifest.v1+json")]
    return layout.write()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda manifest: manifest["layers"][0].update(mediaType="application/vnd.oci.image.layer.v1.tar+gzip+encrypted"), r"\+encrypted"),
        (lambda manifest: manifest["config"].update(mediaType="application/vnd.cncf.helm.config.v1+json"), "helm"),
        (
            lambda manifest: manifest["layers"][0].update(
                mediaType="application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", digest="sha256:" + "1" * 64
            ),
            "foreign",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_type(store, layout, change, said):
    with pytest.raises(InvalidArgument, match=said) as caught:
        build(store, "image", source=f"oci:{edit(layout.image([tar_of(file('x'))]), change)}")
    assert caught.value.field == "source"


def test_an_image_for_another_machine_is_none_for_this(store, layout):
    layout.image([tar_of(file("x"))], architecture="s390x")
    del layout.manifests[0]["platform"]
    with pytest.raises(NotFound, match="s390x"):
        build(store, "image", source=f"oci:{layout.write()}")


def test_what_buildkit_adds_to_an_index_is_left_out(store, layout, tmp_path):
    layout.image([tar_of(file("ours"))], architecture=os.uname().machine.replace("x86_64", "amd64").replace("aarch64", "arm64"))
    layout.image([tar_of(file("attestation"))], architecture="unknown")
    layout.manifests[1] |= {
        "platform": {"os": "unknown", "architecture": "unknown"},
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    }
    layout.index("latest")
    build(store, "image", source=f"oci:{layout.write()}")
    assert (next(mount(store, "image", tmp_path)) / "ours").exists()


# -- archives ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_an_archive_in_both_forms_is_read_where_it_lies(store, layout, tmp_path, compress):
    """As `docker save` writes it since its images lie in containerd's store."""
    path = layout.image([tar_of(file("x"))], name="1").write()
    layer = layout.layers_of(0)[0]["digest"]
    config = json.loads((path / "blobs/sha256" / layout.manifests[0]["digest"][7:]).read_text())["config"]["digest"]
    manifest = [{"Config": f"blobs/sha256/{config[7:]}", "RepoTags": ["x:1"], "Layers": [f"blobs/sha256/{layer[7:]}"]}]
    (path / "manifest.json").write_text(json.dumps(manifest))
    plain = subprocess.run(["tar", "-c", "-C", path, "."], check=True, capture_output=True).stdout
    (tmp_path / "saved").write_bytes(compress(plain))
    info = build(store, "image", source=f"oci:{tmp_path / 'saved'}")
    assert info.digest == build(store, "folder", source=f"oci:{path}").digest
    (path / "index.json").unlink()
    assert build(store, "docker", source=f"oci:{path}@x:1").digest == info.digest


def test_files_of_an_archive_that_lead_nowhere_are_missing(store, tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, target in (("manifest.json", "other"), ("other", "manifest.json")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = SYM, target
            archive.addfile(info)
    (tmp_path / "loop.tar").write_bytes(packed.getvalue())
    with pytest.raises(InvalidArgument, match=r"manifest\.json"):
        build(store, "image", source=f"oci:{tmp_path / 'loop.tar'}")


# -- others' tools -----------------------------------------------------------------------------------------------------------------


def random_layers(rng, count):
    """Layers that refer to each other's names: files, folders, links, whiteouts, opaque folders, replacements of every kind."""
    paths = ["a", "b", "c", "a/x", "a/y", "b/x", "a/x/1", "a/x/2", "b/x/1", "c/deep", "c/deep/er"]
    layers = []
    for number in range(count):
        members, taken = [], {}
        for path in rng.sample(paths, rng.randrange(2, 8)):
            above = path.rpartition("/")[0]
            if any(taken.get(prefix, "folder") != "folder" for prefix in _above(path)) or path in taken:
                continue
            for prefix in _above(path):
                if prefix not in taken:
                    members.append(folder(prefix, mode=0o755, mtime=number))
                    taken[prefix] = "folder"
            kind = rng.choice(["file", "folder", "link", "whiteout", "opaque"])
            if kind == "file":
                members.append(file(path, f"{path} {number}".encode() * rng.choice([1, 500]), uid=rng.randrange(3), mtime=number))
            elif kind == "link":
                members.append((path, SYM, {"linkname": rng.choice(paths), "mtime": number}, b""))
            elif kind == "whiteout":
                members.append(file(f"{above}/.wh.{path.rpartition('/')[2]}".lstrip("/"), b"w"))
            else:
                members.append(folder(path, mode=rng.choice([0o755, 0o700]), mtime=number))
                if kind == "opaque":
                    members.append(file(f"{path}/.wh..wh..opq", b"w"))
                kind = "folder"
            taken[path] = kind
        layers.append(tar_of(*members))
    return layers


def _above(path):
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("umoci") is None, reason="needs umoci")
@pytest.mark.parametrize("seed", range(6))
def test_umoci_and_we_agree(store, tmp_path, seed):
    """An independent unpacker of layers."""
    layers = random_layers(random.Random(seed), 6)
    layout = Layout(tmp_path / "layout").image(layers, configuration={}, name="latest")
    path = layout.write()
    subprocess.run(["umoci", "unpack", "--image", f"{path}:latest", tmp_path / "bundle"], check=True, capture_output=True)
    expected = describe(tmp_path / "bundle/rootfs")
    build(store, "one", source=f"oci:{path}", kind="toolkit")
    build(store, "many", source=f"oci:{path}", kind="toolkit", collapse_below=0)
    (tmp_path / "empty").mkdir()
    build(store, "bare", source=f"tar:{write(tmp_path / 'bare', tar_of(folder('unlikely')))}")
    for name in ("one", "many"):
        paths = store.acquire(store.resolve(["bare", name]).digests, f"sb-{name}")[1:]
        found = describe(paths[0]) if len(paths) == 1 else _overlaid(paths, tmp_path / name)
        # umoci leaves a folder's time as its last change set it, and makes the root's anew
        assert {key: _timeless(value) for key, value in found.items()} == {key: _timeless(value) for key, value in expected.items()}


def _overlaid(paths, target):
    target.mkdir()
    subprocess.run(["mount", "-t", "overlay", "none", target, "-o", "ro,lowerdir=" + ":".join(reversed(paths))], check=True)
    try:
        return describe(target)
    finally:
        subprocess.run(["umount", target], check=True)


def _timeless(facts):
    kind, mode, uid, gid, mtime, content, xattrs, _ = facts
    return kind, mode, uid, gid, None if kind == 0o040000 else mtime, content, xattrs


def write(path, data):
    path.write_bytes(data)
    return path
