"""Images and sources whose words no command could be run with, or that would take too much memory: refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
import time

import pytest
from layouts import CONFIGURATION, MACHINE, Layout, file, folder, tar_of

from dsec.environments import build
from dsec.environments.sources.builder import Tally, TreeBuilder
from dsec.environments.sources.furnishing import add_folder
from dsec.environments.sources.settings import read_settings
from dsec.environments.trees import Node
from dsec.environments.trees import folder as tree_folder
from libdsec.errors import InvalidArgument, QuotaExceeded

pytestmark = pytest.mark.root

SETTINGS = {
    "a name with a newline": {"Env": ["A\nB=1"]},
    "no name": {"Env": ["=1"]},
    "a NUL": {"Env": ["A=\0"]},
    "a NUL in a word": {"Cmd": ["a\0"]},
    "a long variable": {"Env": ["A=" + "x" * (128 << 10)]},
    "many variables": {"Env": [f"A{number}={'x' * 60_000}" for number in range(20)]},
    "a relative folder": {"WorkingDir": "srv"},
    "a long folder": {"WorkingDir": "/d" * 2049},
    "a relative volume": {"Volumes": {"data": {}}},
    "a long volume": {"Volumes": {"/d" * 2049: {}}},
    "many volumes": {"Volumes": {f"/v{number}": {} for number in range(2000)}},
    "a user with a newline": {"User": "root\nroot"},
    "no settings": 5,
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_no_command_could_have_are_refused(store, tmp_path, what):
    layout = Layout(tmp_path / "layout").image([tar_of(file("a"))], configuration=SETTINGS[what])
    with pytest.raises(InvalidArgument) as caught:
        build(store, "image", source=f"oci:{layout.write()}")
    assert (caught.value.field, caught.value.cause) == ("source", "archive")
    assert store.list() == []


def test_ordinary_settings_are_taken():
    assert read_settings({**CONFIGURATION, "Volumes": {"/data": {}}, "User": "1000:1000"}).folders == ["/data", "/srv"]
    assert read_settings(None).folders == ["/"]


def test_a_deep_working_directory_takes_no_time():
    trees = [tree_folder()]
    begun = time.process_time()
    add_folder(trees, "/d" * 2000)
    add_folder(trees, "/d" * 2000 + "/e")
    assert time.process_time() - begun < 1
    node, depth = trees[0], 0
    while node.children:
        [node] = node.children.values()
        depth += 1
    assert depth == 2001


def docker_archive(path, **changes):
    layer = tar_of(file("a"))
    settings = {
        "architecture": MACHINE,
        "os": "linux",
        "config": {},
        "rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    path.mkdir()
    (path / "layer.tar").write_bytes(layer)
    (path / "config.json").write_text(json.dumps(settings))
    (path / "manifest.json").write_text(json.dumps([{"Config": "config.json", "Layers": ["layer.tar"], **changes}]))
    return path


@pytest.mark.parametrize(
    "changes", [{"Layers": [5]}, {"Layers": 5}, {"Layers": {"a": 1}}, {"Config": 5}, {"Config": None}, {"Layers": [["layer.tar"]]}]
)
def test_a_docker_archive_whose_names_are_none_is_refused(store, tmp_path, changes):
    build(store, "good", source=f"oci:{docker_archive(tmp_path / 'good')}")
    with pytest.raises(InvalidArgument) as caught:
        build(store, "image", source=f"oci:{docker_archive(tmp_path / 'bad', **changes)}")
    assert caught.value.cause == "archive"


def pax_tar(path, name, *, link=None, **records):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.pax_headers = records
        if link is not None:
            info.type, info.linkname = tarfile.LNKTYPE, link
        archive.addfile(info)
    return path


def test_an_attribute_with_a_nul_is_refused(store, tmp_path):
    with pytest.raises(InvalidArgument, match="attribute"):
        build(store, "t", source=f"tar:{pax_tar(tmp_path / 't', 'a', **{'SCHILY.xattr.user.a' + chr(0) + 'b': 'v'})}")


def test_a_hard_link_to_a_path_too_long_for_a_link_is_refused(store, tmp_path):
    target = "/".join(["d" * 15] * 256)
    assert len(target) == 4095
    layer = pax_tar(tmp_path / "t", "a", link="/" + target[1:] + "e").read_bytes()
    longer = pax_tar(tmp_path / "u", "a", link="dd" + target[1:]).read_bytes()
    for number, data in enumerate((layer, longer)):
        layout = Layout(tmp_path / f"layout{number}").image([tar_of(file("x")), data])
        with pytest.raises(InvalidArgument) as caught:
            build(store, "image", source=f"oci:{layout.write()}")
        assert caught.value.cause == "archive"


def test_a_path_that_is_no_text_is_a_source_like_others(store, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(path)
    info = build(store, "env", source=f"dir:{path}", command=f"dsec env build env --from dir:{path}")
    assert info.source.endswith("caf\\udce9")
    with pytest.raises(InvalidArgument, match="dest"):
        build(store, "env", source=f"dir:{path}", kind="workspace", dest="/caf\udce9")


def test_attributes_that_are_too_much_for_a_layer_are_an_error_with_a_type(store, scratch):
    tree = scratch.create("sb", None) / "upper"
    (tree / "file").touch()
    for number in range(40):
        os.setxattr(tree / "file", f"user.{number}", b"v" * 15_000)
    with pytest.raises(InvalidArgument, match="attributes"):
        build(store, "env", source=f"dir:{tree}")
    assert store.list() == []


def test_entries_and_what_is_kept_are_counted_for_all_trees_together():
    tally = Tally(entries=10, kept=10_000)
    for layer in range(2):
        builder = TreeBuilder(layered=True, tally=tally)
        for number in range(4):
            builder.put(b"%d.%d" % (layer, number), Node(stat.S_IFREG | 0o644, inline=b"x" * 100, size=100))
    with pytest.raises(QuotaExceeded) as caught:
        TreeBuilder(tally=tally).put(b"a/b/c/d", Node(stat.S_IFREG | 0o644))
    assert caught.value.cause == "files"
    small = TreeBuilder(tally=Tally(entries=1000, kept=10_000))
    for number in range(17):
        small.put(b"%d" % number, Node(stat.S_IFREG | 0o644, inline=b"x" * 500, size=500))
    with pytest.raises(QuotaExceeded):
        small.put(b"more", Node(stat.S_IFREG | 0o644, inline=b"x" * 1000, size=1000))


def test_a_tree_from_the_store_counts_too():
    root = tree_folder()
    root.children = {b"%d" % number: Node(stat.S_IFREG | 0o644) for number in range(11)}
    with pytest.raises(QuotaExceeded):
        Tally(entries=10).add_tree(root)


def test_a_layer_laid_over_itself_is_one(store, tmp_path):
    hiding, layer = tar_of(file(".wh.gone"), file("kept")), tar_of(file("gone"), file("a"))
    once = build(store, "once", source=f"oci:{Layout(tmp_path / 'once').image([layer, hiding]).write()}")
    often = build(store, "often", source=f"oci:{Layout(tmp_path / 'often').image([layer, *[hiding] * 20]).write()}")
    assert often.digest == once.digest


# -- whiteouts and folders above -----------------------------------------------------------------------------------------------------


def test_no_ghost_of_a_whiteout_is_in_a_base(store, tmp_path):
    layout = Layout(tmp_path / "layout").image([tar_of(folder("d"), file("d/.wh.gone"), file(".wh.too"), file("a"))])
    (tmp_path / "tree").mkdir()
    os.mknod(tmp_path / "tree/gone", stat.S_IFCHR, 0)
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        archive.add(tmp_path / "tree", ".")
    for name, source in {"image": f"oci:{layout.write()}", "dir": f"dir:{tmp_path / 'tree'}", "tar": f"tar:{tmp_path / 't.tar'}"}.items():
        build(store, name, source=source)
        [path] = store.acquire(store.resolve([name]).digests, f"sb-{name}")
        assert not any(stat.S_ISCHR(os.lstat(os.path.join(above, entry)).st_mode) for above, _, files in os.walk(path) for entry in files)


def test_a_workspace_hides_what_it_says(store, tmp_path):
    (tmp_path / "tree").mkdir()
    os.mknod(tmp_path / "tree/gone", stat.S_IFCHR, 0)
    build(store, "code", source=f"dir:{tmp_path / 'tree'}", kind="workspace", dest="/")
    [path] = store.acquire([store.show("code").digest], "sb-1")
    assert os.lstat(f"{path}/gone").st_rdev == 0
    assert os.getxattr(path, "trusted.overlay.origin") == b""


@pytest.mark.parametrize(
    ("dest", "modes"),
    [
        ("/tmp/x", {"tmp": 0o1777}),
        ("/root/x/y", {"root": 0o700, "root/x": 0o755}),
        ("/var/tmp/x", {"var": 0o755, "var/tmp": 0o1777}),
        ("/root", {}),
    ],
)
def test_folders_above_a_workspace_are_as_systems_have_them(store, tmp_path, dest, modes):
    (tmp_path / "tree").mkdir(mode=0o750)
    build(store, "code", source=f"dir:{tmp_path / 'tree'}", kind="workspace", dest=dest)
    [path] = store.acquire([store.show("code").digest], "sb-1")
    assert {name: stat.S_IMODE(os.stat(f"{path}/{name}").st_mode) for name in modes} == modes
    assert stat.S_IMODE(os.stat(path + dest).st_mode) == 0o750
