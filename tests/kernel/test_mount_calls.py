"""Mounts by descriptor, on the real kernel."""

from __future__ import annotations

import errno
import os

import pytest

from dsec.kernel.mountinfo import mount_at, mounts_below, parse_mountinfo
from dsec.kernel.mounts import ATTR_NOEXEC, ATTR_RDONLY, attach, clone_tree, make_mount, set_attributes, unmount

pytestmark = pytest.mark.root


@pytest.fixture
def target(tmp_path):
    """A mount point; whatever is mounted there at the end goes."""
    path = tmp_path / "with space\nand newline"
    path.mkdir()
    yield path
    while mount_at(path):
        unmount(path, lazy=True)


def test_a_file_system_is_made_and_placed(target):
    mount = make_mount("tmpfs", options=[("size", "1m"), ("mode", "0711")], attributes=ATTR_NOEXEC)
    assert mount_at(target) is None
    attach(mount, target)
    os.close(mount)
    found = mount_at(target)
    assert found.kind == "tmpfs"
    assert "noexec" in found.options.split(",")
    assert target.stat().st_mode & 0o777 == 0o711
    assert [below.target for below in mounts_below(target.parent)] == [str(target)]
    unmount(target)
    assert mount_at(target) is None


def test_a_mount_that_was_never_placed_goes_with_its_descriptor():
    mount = make_mount("tmpfs")
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=mount))
    os.close(mount)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(mount)


def test_a_clone_is_another_mount_of_the_same_files(target, tmp_path):
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin/file").write_text("x")
    clone = clone_tree(tmp_path / "origin")
    set_attributes(clone, add=ATTR_RDONLY)
    attach(clone, target)
    os.close(clone)
    assert (target / "file").read_text() == "x"
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").touch()
    (tmp_path / "origin/new").touch()
    assert (target / "new").exists()


def test_two_mounts_at_one_place_are_told_from_top_down(target):
    for kind in ("tmpfs", "ramfs"):
        mount = make_mount(kind)
        attach(mount, target)
        os.close(mount)
    assert mount_at(target).kind == "ramfs"
    unmount(target)
    assert mount_at(target).kind == "tmpfs"


def test_errors_name_the_call_the_option_and_what_the_kernel_said(target, tmp_path):
    with pytest.raises(OSError, match="fsopen") as caught:
        make_mount("nosuchfs")
    assert caught.value.errno == errno.ENODEV
    with pytest.raises(OSError, match=r"fsconfig\(nonsense\).*[Uu]nknown parameter"):
        make_mount("tmpfs", options=[("nonsense", "1")])
    with pytest.raises(OSError, match="umount2") as missing:
        unmount(tmp_path / "absent")
    assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, str(tmp_path / "absent"))
    mount = make_mount("tmpfs")
    try:
        with pytest.raises(OSError, match="move_mount"):
            attach(mount, tmp_path / "absent")
    finally:
        os.close(mount)


def test_a_mount_in_use_is_busy_unless_lazily_unmounted(target):
    mount = make_mount("tmpfs")
    attach(mount, target)
    os.close(mount)
    with (target / "file").open("w"):
        with pytest.raises(OSError, match="busy"):
            unmount(target)
        unmount(target, lazy=True)
        assert mount_at(target) is None


def test_a_symbolic_link_is_not_followed_to_unmount(target, tmp_path):
    mount = make_mount("tmpfs")
    attach(mount, target)
    os.close(mount)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match="umount2"):
        unmount(tmp_path / "link")
    assert mount_at(target) is not None


def test_lines_of_mountinfo_are_read_whatever_optional_fields_they_have():
    text = rb"""36 35 98:0 /mnt1 /mnt2\040x rw,noatime master:1 shared:7 - ext3 /dev/ro\134ot rw,errors=continue
37 36 0:5 / /a\011b\012c ro - tmpfs none rw
"""
    first, second = parse_mountinfo(text)
    assert (first.mount_id, first.parent_id, first.device, first.root) == (36, 35, (98, 0), "/mnt1")
    assert (first.target, first.kind, first.source, first.super_options) == ("/mnt2 x", "ext3", "/dev/ro\\ot", "rw,errors=continue")
    assert (second.target, second.options, second.source) == ("/a\tb\nc", "ro", "none")
