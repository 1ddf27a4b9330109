"""openat2: no step leaves the root."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dsec.kernel.paths import BENEATH, NO_LINKS, open_in


@pytest.fixture
def root(tmp_path):
    """A root with links that try; beside it what they try for."""
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/secret").write_text("inside")
    (tmp_path / "root/up").symlink_to("../secret")
    (tmp_path / "root/etc/absolute").symlink_to("/secret")
    (tmp_path / "root/etc/magic").symlink_to("/proc/self/root")
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def read(root, path, **options):
    with os.fdopen(open_in(root, path, os.O_RDONLY, **options)) as file:
        return file.read()


@pytest.mark.parametrize("path", ["secret", "/secret", "../secret", "etc/../../../secret", "up", "etc/absolute", "etc/./absolute"])
def test_every_way_ends_inside(root, path):
    assert read(root, path) == "inside"


@pytest.mark.parametrize("path", ["../secret", "up", "etc/absolute", "/secret"])
def test_beneath_refuses_what_leads_out(root, path):
    with pytest.raises(OSError, match="openat2") as caught:
        open_in(root, path, os.O_RDONLY, resolve=BENEATH)
    assert caught.value.errno == errno.EXDEV


def test_links_are_refused_where_none_are_wanted(root):
    with pytest.raises(OSError, match="openat2") as caught:
        open_in(root, "etc/absolute", os.O_RDONLY, resolve=BENEATH | NO_LINKS)
    assert caught.value.errno == errno.ELOOP


def test_magic_links_lead_nowhere(tmp_path):
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match="openat2") as caught:
            open_in(fd, f"/proc/self/fd/{fd}/etc", os.O_PATH)
        assert caught.value.errno == errno.ELOOP
    finally:
        os.close(fd)


def test_a_file_is_made_and_its_descriptor_ends_at_exec(root, tmp_path):
    fd = open_in(root, b"etc/\xff", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o640)
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert Path(os.fsdecode(os.fsencode(tmp_path) + b"/root/etc/\xff")).stat().st_mode & 0o777 == 0o640
