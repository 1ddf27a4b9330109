"""Loop devices and btrfs ioctls, on the real kernel."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from dsec.kernel import btrfs
from dsec.kernel.loop import attached_loop, loop_devices_of
from dsec.kernel.mounts import attach, make_mount, unmount

pytestmark = pytest.mark.root


@pytest.fixture
def image(tmp_path):
    """An empty file of 128 MiB."""
    path = tmp_path / "image"
    path.touch()
    os.truncate(path, 128 << 20)
    return path


@pytest.mark.parametrize("direct_io", [True, False])
def test_a_file_is_a_block_device_as_long_as_it_is_wanted(image, direct_io):
    with attached_loop(image, direct_io=direct_io) as device:
        assert loop_devices_of(image) == [device]
        fd = os.open(device, os.O_RDWR)
        assert os.lseek(fd, 0, os.SEEK_END) == 128 << 20
        os.pwrite(fd, b"through" + bytes(505), 4096)
        os.fsync(fd)
        os.close(fd)
    assert loop_devices_of(image) == []
    with image.open("rb") as file:
        file.seek(4096)
        assert file.read(7) == b"through"


def test_two_files_have_two_devices(image, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 20))
    with attached_loop(image) as first, attached_loop(other) as second:
        assert first != second


@pytest.fixture
def volume(image, tmp_path):
    """A mounted btrfs with simple quotas, as a descriptor."""
    subprocess.run(["mkfs.btrfs", "--quiet", str(image)], check=True, capture_output=True)
    target = tmp_path / "mounted"
    target.mkdir()
    with attached_loop(image) as device:
        mount = make_mount("btrfs", source=device)
        attach(mount, target)
        os.close(mount)
    fd = os.open(target, os.O_RDONLY)
    btrfs.enable_simple_quota(fd)
    yield fd
    os.close(fd)
    unmount(target)
    assert loop_devices_of(image) == []


def test_quotas_are_seen_to_be_on(volume):
    filesystem = btrfs.filesystem_id(volume)
    assert btrfs.quota_mode(filesystem) == "squota"
    assert btrfs.quota_mode("00000000-0000-0000-0000-000000000000") is None


def test_a_subvolume_is_counted_under_its_id(volume):
    btrfs.create_subvolume(volume, "sub volume")
    fd = os.open("sub volume", os.O_RDONLY, dir_fd=volume)
    identifier = btrfs.subvolume_id(fd)
    assert identifier != btrfs.subvolume_id(volume) == btrfs.TOP_LEVEL
    assert os.fstat(fd).st_ino == btrfs.ROOT_INODE
    assert identifier in btrfs.qgroup_ids(btrfs.filesystem_id(volume))
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.write(file, os.urandom(1 << 20))
    os.fsync(file)
    assert btrfs.referenced_bytes(btrfs.filesystem_id(volume), identifier) >= 1 << 20
    os.close(file)
    os.close(fd)


def write_all(file, size):
    while size:
        size -= os.write(file, bytes(size))


def test_a_limit_holds_and_can_be_lifted(volume):
    btrfs.create_subvolume(volume, "sub")
    fd = os.open("sub", os.O_RDONLY, dir_fd=volume)
    btrfs.set_limit(fd, btrfs.subvolume_id(fd), 1 << 20)
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    with pytest.raises(OSError, match="quota") as caught:
        write_all(file, 4 << 20)
    assert caught.value.errno == errno.EDQUOT
    btrfs.set_limit(fd, btrfs.subvolume_id(fd), None)
    assert os.write(file, bytes(4 << 20)) == 4 << 20
    os.close(file)
    os.close(fd)


def test_what_is_not_there_or_there_already_is_said_with_its_name(volume):
    btrfs.create_subvolume(volume, "sub")
    with pytest.raises(FileExistsError, match="SUBVOL_CREATE") as caught:
        btrfs.create_subvolume(volume, "sub")
    assert caught.value.filename == "sub"
    btrfs.destroy_subvolume(volume, "sub")
    with pytest.raises(FileNotFoundError, match="SNAP_DESTROY"):
        btrfs.destroy_subvolume(volume, "sub")
    for name in ("", "a/b", "x" * 256):
        with pytest.raises(OSError, match="subvolume name"):
            btrfs.create_subvolume(volume, name)
