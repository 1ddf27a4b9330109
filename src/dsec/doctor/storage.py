"""Probes of how environments are put together and what sandboxes write to."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

from dsec._native import native_binary
from dsec.doctor.commands import first_line, require, run
from dsec.doctor.probing import Absent, Probe
from dsec.doctor.walls import mapped_user_namespace
from dsec.environments import trees
from dsec.environments.erofs import write_image
from dsec.environments.packs import Packer, data_name
from dsec.kernel import btrfs, erofs, features, loop, mounts

__all__ = ["PROBES"]

CONTENT = b"held by a pack, not by the metadata\n" * 200


def _private_mounts() -> None:
    features.unshare(features.CLONE_NEWNS)
    features.make_mounts_private()


def _make_image(folder: Path, *, with_pack: bool) -> tuple[Path, list[Path]]:
    """As layers are made: contents in a pack, unless they are small and lie in the metadata."""
    packer = Packer(folder)
    content = CONTENT if with_pack else CONTENT[:40]
    size, inline, segments = packer.add([content])
    pack = packer.finish()
    root = trees.folder()
    root.children = {b"file": trees.Node(stat.S_IFREG | 0o644, size=size, inline=inline, segments=segments)}
    write_image(root, folder / "metadata")
    return folder / "metadata", [folder / data_name(pack.digest)] if pack is not None else []


def _mount_image(folder: Path, *, with_pack: bool) -> Path:
    _private_mounts()
    metadata, packs = _make_image(folder, with_pack=with_pack)
    target = folder / "mounted"
    target.mkdir()
    erofs.mount_erofs(metadata, packs, target)
    if (target / "file").read_bytes() not in (CONTENT, CONTENT[:40]):
        raise Absent("mounts, but reads back something else")
    return target


def _erofs_file(folder: Path) -> str:
    _mount_image(folder, with_pack=False)
    return "mounted from a plain file, no loop device"


def _erofs_devices(folder: Path) -> str:
    _mount_image(folder, with_pack=True)
    return "metadata and data in two files"


def _idmapped(folder: Path) -> str:
    target = _mount_image(folder, with_pack=True)
    with mapped_user_namespace() as namespace:
        clone = mounts.clone_tree(target)
        mounts.set_attributes(clone, user_namespace=namespace)
        owner = os.stat("file", dir_fd=clone).st_uid
    if owner != 0x10000000:
        raise Absent(f"owner 0 shows as {owner}")
    return "an EROFS layer, shifted to a sandbox's ids"


def _overlay(folder: Path) -> str:
    _private_mounts()
    mounts.attach(mounts.make_mount("tmpfs"), folder)
    for name in ("lower1", "lower2", "upper", "work", "merged"):
        (folder / name).mkdir()
    (folder / "lower1/one").touch()
    (folder / "lower2/two").touch()
    opened = {name: os.open(folder / name, os.O_PATH | os.O_DIRECTORY) for name in ("lower1", "lower2", "upper", "work")}
    options: list[tuple[str, str | int | None]] = [
        ("lowerdir+", opened["lower2"]),
        ("lowerdir+", opened["lower1"]),
        ("upperdir", opened["upper"]),
        ("workdir", opened["work"]),
    ]
    mounts.attach(mounts.make_mount("overlay", options=options), folder / "merged")
    (folder / "merged/new").touch()
    if not {"one", "two"} <= set(os.listdir(folder / "merged")) or not (folder / "upper/new").exists():
        raise Absent("mounts, but does not merge")
    return "layers and upper by descriptor"


def _pack_server(folder: Path) -> str:
    """What stands between EROFS and a store that is not on a local disk."""
    _private_mounts()
    places = {name: folder / name for name in ("store", "mounted", "control")}
    places["store"].mkdir()
    places["mounted"].mkdir()
    name = "0" * 64 + ".data"
    (places["store"] / name).write_bytes(CONTENT)
    options = ["--store", str(places["store"]), "--mount", str(places["mounted"]), "--control", str(places["control"])]
    command = [str(native_binary()), "blobcache", *options, "--memory-bytes=8388608", "--parallel=1", "--spare=0"]
    with (folder / "said").open("w+") as said:
        # It goes on by itself, so that a pipe would not end with the command.
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, check=False).returncode != 0:
            said.seek(0)
            raise Absent(said.read().strip().rpartition("\n")[2])
    try:
        if (places["mounted"] / name).read_bytes() != CONTENT:
            raise Absent("mounts, but reads back something else")
    finally:
        mounts.unmount(places["mounted"], lazy=True)
    return "a FUSE server of our own, read through"


def _mmdebstrap(_folder: Path) -> str:
    return first_line(["mmdebstrap", "--version"])


def _mkfs_btrfs(_folder: Path) -> str:
    require("mkfs.btrfs")
    return first_line(["mkfs.btrfs", "--version"])


def _btrfs_quota(folder: Path) -> str:
    """On an image as the scratch store makes it, whatever the state folder is on: that is what it falls back to."""
    _private_mounts()
    image, target = folder / "image", folder / "btrfs"
    target.mkdir()
    with image.open("wb") as made:
        made.truncate(128 << 20)
    run(["mkfs.btrfs", "--quiet", "--data", "single", "--metadata", "single", str(image)])
    with loop.attached_loop(image, direct_io=False) as device:
        mounts.attach(mounts.make_mount("btrfs", source=device), target)
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    btrfs.enable_simple_quota(root)
    btrfs.create_subvolume(root, "sandbox")
    inside = os.open(target / "sandbox", os.O_RDONLY | os.O_DIRECTORY)
    btrfs.set_limit(inside, btrfs.subvolume_id(inside), 4 << 20)
    written = 0
    piece = b"x" * (1 << 20)
    try:
        with open(target / "sandbox/file", "wb", buffering=0) as file:
            for _ in range(16):
                written += file.write(piece)
    except OSError as error:
        if error.errno != errno.EDQUOT:
            raise
        return f"EDQUOT after {written >> 20} of 4 MiB, on a loop image"
    raise Absent("16 MiB went past a limit of 4 MiB")


def _skopeo(_folder: Path) -> str:
    return first_line(["skopeo", "--version"])


def _git(_folder: Path) -> str:
    return first_line(["git", "--version"])


PROBES = [
    Probe(
        "EROFS from a file",
        _erofs_file,
        "mounting layers, once a node",
        "no container sandboxes",
        "Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE",
        required=True,
    ),
    Probe(
        "EROFS, several devices",
        _erofs_devices,
        "metadata local, data on the shared store",
        "no container sandboxes",
        "Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE",
        required=True,
    ),
    Probe(
        "idmapped mounts",
        _idmapped,
        "one layer, a different owner in each sandbox, nothing copied",
        "no container sandboxes",
        "Linux 6.1 or later",
        required=True,
    ),
    Probe(
        "overlay by descriptors",
        _overlay,
        "the sandbox's root, of any number of layers",
        "no container sandboxes",
        "Linux 6.13 or later",
        required=True,
    ),
    Probe(
        "server of packs",
        _pack_server,
        "stores on network file systems: deadlines, reads in bulk, a cache",
        "stores on local disks only",
        "Linux 5.13 with CONFIG_FUSE_FS (6.9, so that no read is lost when the server is killed), and /dev/fuse",
    ),
    Probe(
        "btrfs simple quota",
        _btrfs_quota,
        "`disk_limit_mb`, snapshots in no time",
        "no disk limit",
        "Linux 6.7 with CONFIG_BTRFS_FS and loop devices; apt-get install btrfs-progs",
    ),
    Probe("mkfs.btrfs", _mkfs_btrfs, "the scratch image", "the state folder must be on btrfs", "apt-get install btrfs-progs"),
    Probe(
        "mmdebstrap",
        _mmdebstrap,
        "`dsec env build --from debian:...`",
        "bases from folders, tars and OCI images only",
        "apt-get install mmdebstrap",
    ),
    Probe("skopeo", _skopeo, "images from registries", "images from layouts and archives only", "apt-get install skopeo"),
    Probe("git", _git, "workspaces from git repositories", "workspaces from folders and archives only", "apt-get install git"),
]
