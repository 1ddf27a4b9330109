"""From a folder to a mounted layer that is the folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from trees import describe

from dsec.environments import build
from libdsec.errors import InvalidArgument, NotFound

pytestmark = pytest.mark.root


def mounted(store, *refs):
    return store.acquire(store.resolve(refs).digests, "sb-reader")


def test_what_is_mounted_is_what_was_built(store, full_tree):
    build(store, "full", source=f"dir:{full_tree}", kind="toolkit", dest="/")
    build(store, "base", source=f"dir:{full_tree}")
    _, toolkit = mounted(store, "base", "full")
    assert describe(full_tree) == describe(toolkit)


def test_a_layer_is_read_only_and_gives_no_rights_on_the_host(store, full_tree):
    build(store, "base", source=f"dir:{full_tree}")
    [path] = mounted(store, "base")
    flags = os.statvfs(path).f_flag
    assert flags & os.ST_RDONLY
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    with pytest.raises(OSError, match="Read-only"):
        Path(path, "new").touch()


def test_equal_trees_have_one_digest_whatever_the_order_they_were_made_in(store, full_tree, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for entry in sorted(full_tree.iterdir(), reverse=True):
        subprocess.run(["cp", "-a", entry, other], check=True)
    # the copy loses the hard link between entries that were copied apart only if they lay in different ones
    shutil.copystat(full_tree, other)
    first = build(store, "one", source=f"dir:{full_tree}")
    second = build(store, "two", source=f"dir:{other}")
    assert describe(full_tree) == describe(other)
    assert first.digest == second.digest
    assert len(store.layers.layers()) == 1


def test_one_changed_time_changes_the_digest(store, full_tree):
    first = build(store, "one", source=f"dir:{full_tree}")
    os.utime(full_tree / "a/file", ns=(0, 1))
    assert build(store, "one", source=f"dir:{full_tree}").digest != first.digest


def test_a_workspace_lies_where_it_is_wanted_and_is_the_working_directory(store, full_tree):
    build(store, "base", source=f"dir:{full_tree}")
    build(store, "code", source=f"dir:{full_tree}", kind="workspace", dest="/srv/./deep//code/")
    resolved = store.resolve(["base", "code"])
    assert resolved.workdir == "/srv/deep/code"
    _, path = store.acquire(resolved.digests, "sb-reader")
    assert os.listdir(path) == ["srv"]
    assert describe(f"{path}/srv/deep/code") == describe(full_tree)
    assert os.stat(f"{path}/srv").st_mtime == 0


def test_a_base_has_what_a_sandbox_is_mounted_over(store, tmp_path):
    tree = tmp_path / "bare"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/resolv.conf").symlink_to("/run/nowhere/resolv.conf")
    (tree / "etc/hosts").write_text("mine\n")
    build(store, "base", source=f"dir:{tree}")
    [path] = mounted(store, "base")
    for folder in ("proc", "sys", "dev", "tmp"):
        assert os.path.isdir(f"{path}/{folder}")
    assert os.stat(f"{path}/tmp").st_mode & 0o7777 == 0o1777
    assert os.path.isfile(f"{path}/etc/resolv.conf")
    assert not os.path.islink(f"{path}/etc/resolv.conf")
    assert Path(path, "etc/hosts").read_text() == "mine\n"
    assert os.path.getsize(f"{path}/etc/hostname") > 0


def test_a_rebuild_moves_the_tag_and_leaves_the_old_digest_usable(store, full_tree):
    old = build(store, "base", source=f"dir:{full_tree}")
    (full_tree / "more").write_text("more")
    new = build(store, "base", source=f"dir:{full_tree}")
    assert store.resolve(["base"]).digests == [new.digest]
    assert store.resolve([f"base@{old.digest}"]).digests == [old.digest]
    assert store.collect_garbage(grace_seconds=0).layers == [old.digest]
    with pytest.raises(NotFound):
        store.resolve([f"base@{old.digest}"])
    assert store.show("base").digest == new.digest


def test_an_empty_tree_makes_a_layer(store, tmp_path):
    (tmp_path / "empty").mkdir()
    build(store, "base", source=f"dir:{tmp_path / 'empty'}")
    info = build(store, "nothing", source=f"dir:{tmp_path / 'empty'}", kind="toolkit", dest="/")
    assert info.data_bytes == 0
    assert os.listdir(mounted(store, "base", "nothing")[1]) == []


def test_progress_goes_through_the_phases_and_counts_to_the_end(store, full_tree):
    steps = []
    build(store, "base", source=f"dir:{full_tree}", progress=steps.append)
    assert list(dict.fromkeys(step.phase for step in steps)) == ["fetch", "merge", "publish"]
    read = [step.done for step in steps if step.phase == "fetch"]
    assert read == sorted(read)
    assert read[-1] > 10_000


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"source": "nothing"}, "source"),
        ({"source": "http://x"}, "source"),
        ({"source": "dir:"}, "source"),
        ({"source": "debian:../x"}, "source"),
        ({"source": "dir:/tmp\0x"}, "source"),
        ({"source": "dir:/etc/passwd"}, "source"),
        ({"source": "tar:/etc"}, "source"),
        ({"source": "dir:/etc", "kind": "kitchen"}, "kind"),
        ({"source": "git:/etc", "kind": "base"}, "kind"),
        ({"source": "debian:bookworm", "kind": "toolkit"}, "kind"),
        ({"source": "dir:/etc", "include": ["git"]}, "include"),
        ({"source": "debian:bookworm", "include": ["--evil"]}, "include"),
        ({"source": "dir:/etc", "kind": "workspace", "dest": "relative"}, "dest"),
        ({"source": "dir:/etc", "kind": "workspace", "dest": "/a/../.."}, "dest"),
        ({"source": "dir:/etc", "dest": "/opt"}, "dest"),
        ({"source": "dir:/etc", "tag": "a/b"}, "tag"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_leave_nothing(store, arguments, field):
    with pytest.raises(InvalidArgument) as caught:
        build(store, "x", **arguments)
    assert caught.value.field == field
    assert store.list() == []
    assert os.listdir(store.layers.building.root) == []


def test_a_source_that_is_not_there_is_not_found(store):
    with pytest.raises(NotFound) as caught:
        build(store, "x", source="dir:/nowhere/at/all")
    assert caught.value.field == "source"


def test_settings_merge_from_the_bottom_and_the_order_of_kinds_is_kept(store, full_tree):
    for name, kind in (("base", "base"), ("code", "workspace"), ("tools", "toolkit")):
        build(store, name, source=f"dir:{full_tree}", kind=kind)
    assert [layer.kind for layer in store.resolve(["base", "code", "tools"]).layers] == ["base", "workspace", "toolkit"]
    for wrong in (["code"], ["code", "base"], ["base", "tools", "code"], ["base", "base"], []):
        with pytest.raises(InvalidArgument) as caught:
            store.resolve(wrong)
        assert caught.value.field == "environment"
    with pytest.raises(NotFound) as missing:
        store.resolve(["absent"], field="container_image")
    assert missing.value.field == "container_image"


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(300)
def test_a_debian_base_is_built_and_runs(store):
    info = build(store, "debian", source="debian:bookworm", include=["python3-minimal"])
    assert info.metadata_bytes < info.data_bytes / 20
    [path] = mounted(store, "debian")
    said = subprocess.run(["chroot", path, "/usr/bin/python3", "-c", "print(6 * 7)"], check=True, capture_output=True, text=True)
    assert said.stdout == "42\n"
    assert os.path.exists(f"{path}/usr/bin/apt-get")
    assert Path(path, "etc/hostname").read_text() == "sandbox\n"
    assert Path(path, "etc/resolv.conf").read_text() == ""
    assert store.sweep_builds() == []
