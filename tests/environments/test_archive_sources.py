"""Tar archives and sdists: what honest ones hold survives, what hostile ones try does not happen."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from trees import describe

from dsec.environments import build
from dsec.environments.packs import Packer
from dsec.environments.sources.archives import Budget, read_tar
from dsec.environments.sources.builder import TreeBuilder
from dsec.environments.sources.streams import Extent, decompressed
from libdsec.errors import DSecError, InvalidArgument, QuotaExceeded

pytestmark = pytest.mark.root

COMPRESSORS = {"none": None, "gz": ["gzip", "-c"], "xz": ["xz", "-c"], "bz2": ["bzip2", "-c"], "zst": ["zstd", "-qc"]}


def write_tar(path, *members, end=True, **options):
    """Members are (name, type, extra TarInfo fields, content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for name, kind, fields, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
        length = archive.offset
    path.write_bytes(buffer.getvalue() if end else buffer.getvalue()[:length])
    return path


def file(name, content=b"content", **fields):
    return (name, tarfile.REGTYPE, {"mode": 0o644, **fields}, content)


def folder(name, **fields):
    return (name, tarfile.DIRTYPE, {"mode": 0o755, **fields}, b"")


def symlink(name, target):
    return (name, tarfile.SYMTYPE, {"linkname": target}, b"")


def hard_link(name, target):
    return (name, tarfile.LNKTYPE, {"linkname": target}, b"")


def mount_toolkit(store, tmp_path, source, **arguments):
    (tmp_path / "bare").mkdir(exist_ok=True)
    build(store, "bare", source=f"dir:{tmp_path / 'bare'}")
    build(store, "archive", source=source, **{"kind": "toolkit", "dest": "/", **arguments})
    return Path(store.acquire(store.resolve(["bare", "archive"]).digests, "sb-reader")[1])


# -- fidelity ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_what_gnu_tar_packs_comes_back_whole(store, full_tree, tmp_path, compression):
    packed = tmp_path / "packed.tar"
    # one socket-free tree with everything; tar's order puts names before their hard links
    subprocess.run(
        ["tar", "--create", "--file", packed, "--format=pax", "--xattrs", "--xattrs-include=*", "--sparse", "-C", full_tree, "."],
        check=True,
    )
    if COMPRESSORS[compression]:
        with open(tmp_path / "packed", "wb") as output:
            subprocess.run([*COMPRESSORS[compression], packed], check=True, stdout=output)
        packed = tmp_path / "packed"
    root = mount_toolkit(store, tmp_path, f"tar:{packed}")
    assert describe(root) == describe(full_tree)


def test_a_tar_and_the_folder_it_was_made_of_are_one_layer(store, full_tree, tmp_path):
    packed = tmp_path / "packed.tar"
    subprocess.run(
        ["tar", "--create", "--file", packed, "--format=pax", "--xattrs", "--xattrs-include=*", "-C", full_tree, "."], check=True
    )
    from_tar = build(store, "one", source=f"tar:{packed}")
    assert from_tar.digest == build(store, "two", source=f"dir:{full_tree}").digest


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_big_numbers_survive(store, tmp_path, form):
    long = "/".join(["d" * 120] * 3) + "/" + "f" * 200
    packed = write_tar(tmp_path / "t", file(long, uid=3_000_000, gid=4_000_000, mtime=5_000_000_000), format=form)
    root = mount_toolkit(store, tmp_path, f"tar:{packed}")
    found = (root / long).stat()
    assert (found.st_uid, found.st_gid, found.st_mtime) == (3_000_000, 4_000_000, 5_000_000_000)


def test_holes_stay_holes(store, tmp_path):
    packed = write_tar(tmp_path / "t", file("sparse", bytes(64 << 16) + b"end"))
    info = build(store, "archive", source=f"tar:{packed}")
    assert info.data_bytes == 4096
    [path] = store.acquire(store.resolve(["archive"]).digests, "sb-1")
    assert Path(path, "sparse").read_bytes() == bytes(64 << 16) + b"end"


def test_a_later_member_replaces_an_earlier_one_of_any_kind(store, tmp_path):
    packed = write_tar(
        tmp_path / "t",
        file("a", b"old"), symlink("a", "/etc/passwd"), file("a", b"new"),
        folder("b"), file("b/inside"), file("b", b"now a file"),
        file("c"), folder("c"), file("c/inside", b"in"),
        symlink("d", "c"), folder("d"), file("d/other", b"other"),
    )  # fmt: skip
    root = mount_toolkit(store, tmp_path, f"tar:{packed}")
    assert (root / "a").read_bytes() == b"new"
    assert (root / "b").read_bytes() == b"now a file"
    assert (root / "c/inside").read_bytes() == b"in"
    assert os.listdir(root / "d") == ["other"]


def test_honest_links_work(store, tmp_path):
    packed = write_tar(
        tmp_path / "t",
        folder("usr/lib"), symlink("lib", "usr/lib"), file("lib/libc.so"), symlink("usr/share", "/data"), folder("data"),
        file("usr/share/doc"), symlink("up", "../../data"), file("up/more"), hard_link("hard", "lib/libc.so"), file("/absolute/name"),
        symlink("soft", "lib/libc.so"), hard_link("hard-soft", "soft"),
    )  # fmt: skip
    root = mount_toolkit(store, tmp_path, f"tar:{packed}")
    assert sorted(os.listdir(root / "usr/lib")) == ["libc.so"]
    assert sorted(os.listdir(root / "data")) == ["doc", "more"]
    assert (root / "hard").stat().st_ino == (root / "usr/lib/libc.so").stat().st_ino
    assert (root / "absolute/name").read_bytes() == b"content"
    assert os.readlink(root / "hard-soft") == "lib/libc.so"


def test_marks_that_would_steer_an_overlay_are_dropped(store, tmp_path):
    headers = {"SCHILY.xattr.trusted.overlay.redirect": "/secret", "SCHILY.xattr.user.kept": "yes", "SCHILY.xattr.security.selinux": "x"}
    packed = write_tar(tmp_path / "t", folder("d", pax_headers=headers))
    root = mount_toolkit(store, tmp_path, f"tar:{packed}")
    assert os.listxattr(root / "d") == ["user.kept"]


# -- hostile archives ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path):
    """A folder that no archive may reach, with a file that none may read or write."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret").write_text("secret")
    yield place
    assert os.listdir(place) == ["secret"]
    assert (place / "secret").read_text() == "secret"
    assert (place / "secret").stat().st_nlink == 1


REFUSED = {
    "dots": lambda out: [file(f"../../../../../../../..{out}/evil")],
    "dots inside": lambda out: [folder("a"), file("a/../../evil")],
    "a folder with dots": lambda out: [folder("a/..")],
    "a hard link with dots": lambda out: [hard_link("evil", f"../../../../../../..{out}/secret")],
    "a hard link outside": lambda out: [hard_link("evil", f"{out}/secret")],
    "a hard link through a link": lambda out: [symlink("out", str(out)), hard_link("evil", "out/secret")],
    "a hard link to a folder": lambda out: [folder("d"), hard_link("evil", "d")],
    "a hard link to nothing": lambda out: [hard_link("evil", "nothing")],
    "below a file": lambda out: [file("a"), file("a/b")],
    "below a loop": lambda out: [symlink("a", "a"), file("a/b")],
    "below a dangling link": lambda out: [symlink("a", "nowhere"), file("a/b")],
    "the root as a file": lambda out: [file("./")],
    "an empty link": lambda out: [symlink("a", "")],
    "a name that is too long": lambda out: [file("x" * 300)],
    "an unknown type": lambda out: [("a", b"Z", {}, b"")],
    "an owner that is none": lambda out: [file("a", uid=1 << 33)],
    "a file of holes that no file system has": lambda out: [
        ("a", tarfile.REGTYPE, {"pax_headers": {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 62), "GNU.sparse.name": "a"}}, b"")
    ],
    "a device that is none": lambda out: [("a", tarfile.CHRTYPE, {"devmajor": 1 << 20, "devminor": 0}, b"")],
}


@pytest.mark.parametrize("attack", REFUSED)
def test_an_archive_that_lies_is_refused_by_member_and_leaves_nothing(store, tmp_path, outside, attack):
    packed = write_tar(tmp_path / "t", *REFUSED[attack](outside), format=tarfile.PAX_FORMAT if "holes" in attack else tarfile.GNU_FORMAT)
    with pytest.raises(InvalidArgument) as caught:
        build(store, "evil", source=f"tar:{packed}")
    assert (caught.value.field, caught.value.cause) == ("source", "archive")
    assert store.list() == []
    assert os.listdir(store.staging.root) == []


STAYS_IN = {
    "an absolute link": lambda out: [symlink("out", str(out)), folder(f"{out}"), file("out/evil")],
    "a link with dots": lambda out: [symlink("out", f"../../../../../../../..{out}"), folder(f"{out}"), file("out/evil")],
    "a chain of links": lambda out: [folder(f"{out}"), symlink("a", ".."), symlink("b", f"a/..{out}"), file("b/evil")],
    "a link to /proc": lambda out: [folder("proc/self/fd"), symlink("out", "/proc/self/fd"), file("out/evil")],
    "overwriting through a link": lambda out: [symlink("evil", f"{out}/secret"), file("evil", b"overwritten")],
    "chmod through a link": lambda out: [symlink("evil", str(out)), folder("evil", mode=0o777, uid=1000)],
}


@pytest.mark.parametrize("attack", STAYS_IN)
def test_links_are_followed_inside_alone(store, tmp_path, outside, attack):
    mode = outside.stat().st_mode
    packed = write_tar(tmp_path / "t", *STAYS_IN[attack](outside))
    root = mount_toolkit(store, tmp_path, f"tar:{packed}")
    assert outside.stat().st_mode == mode
    assert any("evil" in names for _, folders, files in os.walk(root) for names in [folders + files])


def test_a_folder_swapped_for_a_link_between_members_leads_nowhere(store, tmp_path, outside):
    """The folder that was found for one member is not the one that the next one names."""
    packed = write_tar(tmp_path / "t", file("d/one"), symlink("d", str(outside)), file("d/evil"))
    with pytest.raises(InvalidArgument, match="leads nowhere"):
        build(store, "evil", source=f"tar:{packed}")


@pytest.mark.parametrize("kept", ["half a header", "no end mark", "half the data", "nothing", "garbage after a member"])
def test_an_archive_that_is_cut_off_is_refused(store, tmp_path, kept):
    whole = write_tar(tmp_path / "t", file("a", b"a" * 5000), file("b", b"b" * 5000)).read_bytes()
    first = 512 + 5120
    cut = {
        "half a header": whole[: first + 100],
        "no end mark": whole[: 2 * first],
        "half the data": whole[: first + 512 + 1000],
        "nothing": b"",
        "garbage after a member": whole[:first] + os.urandom(1024),
    }[kept]
    (tmp_path / "cut").write_bytes(cut)
    with pytest.raises(InvalidArgument, match="archive") as caught:
        build(store, "cut", source=f"tar:{tmp_path / 'cut'}")
    assert caught.value.field == "source"
    assert store.list() == []


@pytest.mark.parametrize("compression", ["gz", "xz", "bz2", "zst"])
@pytest.mark.parametrize("fault", ["cut off", "flipped"])
def test_a_compressed_archive_that_is_damaged_is_refused(store, tmp_path, compression, fault):
    packed = write_tar(tmp_path / "t", file("a", os.urandom(300_000)))
    data = bytearray(subprocess.run([*COMPRESSORS[compression], packed], check=True, capture_output=True).stdout)
    if fault == "cut off":
        del data[-2000:]
    else:
        data[len(data) // 2] ^= 0xFF
    if compression == "zst" and fault == "flipped":
        data = bytearray(subprocess.run(["zstd", "-qc", "--check", packed], check=True, capture_output=True).stdout)
        data[len(data) // 2] ^= 0xFF
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(InvalidArgument) as caught:
        build(store, "bad", source=f"tar:{tmp_path / 'bad'}")
    assert caught.value.cause == "archive"
    assert store.list() == []


def test_a_header_that_claims_gigabytes_takes_no_memory(store, tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    with open(tmp_path / "bomb", "wb") as output:
        output.write(info.tobuf(tarfile.GNU_FORMAT))
        output.truncate(9 << 30)
    with pytest.raises(InvalidArgument, match="header"):
        build(store, "bomb", source=f"tar:{tmp_path / 'bomb'}")


def read(path, folder, budget):
    """The tree of a tar, its contents in `folder`."""
    packer = Packer(folder)
    builder = TreeBuilder()
    try:
        with path.open("rb", buffering=0) as opened, decompressed(Extent(opened.fileno()), lambda done, total: None) as stream:
            read_tar(stream, builder, packer.add, Budget(budget))
    finally:
        packer.close()
    return builder.finish()


def test_a_member_larger_than_the_budget_ends_the_reading(tmp_path):
    packed = write_tar(tmp_path / "t", file("bomb", bytes(2 << 20)))
    with pytest.raises(QuotaExceeded) as caught:
        read(packed, tmp_path, 1 << 20)
    assert caught.value.cause == "disk"


# -- sdists --------------------------------------------------------------------------------------------------------------------------


def test_an_sdist_is_unpacked_without_its_top_folder_as_roots(store, tmp_path):
    packed = write_tar(
        tmp_path / "pkg-1.0.tar.gz",
        folder("pkg-1.0", uid=501), file("pkg-1.0/setup.py", uid=501, gid=20), hard_link("pkg-1.0/same", "pkg-1.0/setup.py"),
    )  # fmt: skip
    (tmp_path / "bare").mkdir()
    build(store, "bare", source=f"dir:{tmp_path / 'bare'}")
    info = build(store, "pkg", source=f"sdist:{packed}")
    assert (info.kind, info.workdir) == ("workspace", "/workspace")
    root = Path(store.acquire(store.resolve(["bare", "pkg"]).digests, "sb-1")[1])
    found = (root / "workspace/setup.py").stat()
    assert (found.st_uid, found.st_gid, found.st_nlink) == (0, 0, 2)


def test_an_archive_with_two_tops_is_no_sdist(store, tmp_path):
    packed = write_tar(tmp_path / "t", file("a/x"), file("b/y"))
    with pytest.raises(InvalidArgument, match="top folder"):
        build(store, "pkg", source=f"sdist:{packed}")


# -- git -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path):
    """Two commits; attributes that would leave files out, and a filter that would run a command."""
    path = tmp_path / "repository"
    path.mkdir()

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *identity, "-C", path, *arguments], check=True, capture_output=True)

    git("init")
    (path / "code.py").write_text("old\r\n")
    git("add", ".")
    git("commit", "-m", "one")
    git("tag", "v1")
    (path / "code.py").write_text("new\r\n")
    (path / "run me").write_text("#!/bin/sh\n")
    (path / "run me").chmod(0o755)
    (path / "sub").mkdir()
    (path / "sub/link").symlink_to("../code.py")
    (path / "tests").write_text("the tests")
    git("add", ".")
    (path / ".gitattributes").write_text("tests export-ignore\n*.py text eol=lf filter=evil\n")
    git("add", ".gitattributes")
    git("commit", "-m", "two")
    git("config", "filter.evil.smudge", f"touch {tmp_path}/evil; cat")
    git("config", "core.fsmonitor", f"touch {tmp_path}/evil")
    yield path
    assert not (tmp_path / "evil").exists()


def mount_git(store, tmp_path, source):
    (tmp_path / "bare").mkdir()
    build(store, "bare", source=f"dir:{tmp_path / 'bare'}")
    build(store, "code", source=source)
    return Path(store.acquire(store.resolve(["bare", "code"]).digests, "sb-1")[1], "workspace")


def test_a_commit_is_taken_as_it_is_stored_and_without_its_history(store, tmp_path, repository):
    root = mount_git(store, tmp_path, f"git:{repository}")
    assert sorted(os.listdir(root)) == [".gitattributes", "code.py", "run me", "sub", "tests"]
    assert (root / "code.py").read_bytes() == b"new\r\n"
    assert stat.S_IMODE((root / "run me").stat().st_mode) == 0o755
    assert os.readlink(root / "sub/link") == "../code.py"
    assert store.layers.manifest(store.show("code").digest).provenance["commit"]


def test_a_revision_can_be_named_and_uncommitted_changes_do_not_count(store, tmp_path, repository):
    (repository / "code.py").write_text("dirty")
    root = mount_git(store, tmp_path, f"git:{repository}@v1")
    assert os.listdir(root) == ["code.py"]
    assert (root / "code.py").read_bytes() == b"old\r\n"
    again = build(store, "again", source=f"git:{repository}@v1")
    assert again.digest == store.show("code").digest


@pytest.mark.parametrize("revision", ["nothing", "--help", "v1:code.py", ""])
def test_a_revision_that_is_none_is_refused(store, repository, revision):
    with pytest.raises(InvalidArgument) as caught:
        build(store, "code", source=f"git:{repository}@{revision}")
    assert caught.value.field == "source"


def test_a_folder_without_a_repository_is_refused(store, tmp_path):
    with pytest.raises(DSecError) as caught:
        build(store, "code", source=f"git:{tmp_path}")
    assert caught.value.field == "source"
    shutil.rmtree(tmp_path, ignore_errors=True)
