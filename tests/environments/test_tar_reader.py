"""The reader of tar headers, against archives that others write and against the standard library's reader."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.environments.sources.bytestreams import Chunked, Seekable
from dsec.environments.sources.streams import Extent
from dsec.environments.sources.tar import HARD_LINK, TarReader
from libdsec.errors import InvalidArgument

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def read(data, step=1000):
    """All members with their contents, the archive coming in pieces of `step` bytes."""
    reader = TarReader(Chunked(data[start : start + step] for start in range(0, len(data), step)))
    return [(member, b"".join(bytes(p) if isinstance(p, int) else p for p in reader.content(member))) for member in reader]


def write(members, form=tarfile.PAX_FORMAT, **options):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, **options) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def sparse_file(path: Path, runs: int) -> bytes:
    """A file with that many stretches of data, each of its own bytes, and a hole at its end."""
    with path.open("wb") as file:
        for number in range(runs):
            file.seek(number * 20_480)
            file.write(os.urandom(4096))
        file.truncate(runs * 20_480 + 100_000)
    return path.read_bytes()


@pytest.mark.parametrize("runs", [0, 1, 4, 5, 25, 26, 120])
@pytest.mark.parametrize(
    "form",
    [
        ["--format=gnu"],
        ["--format=pax", "--sparse-version=0.0"],
        ["--format=pax", "--sparse-version=0.1"],
        ["--format=pax", "--sparse-version=1.0"],
    ],
)
def test_sparse_files_of_every_kind_are_read_whole(tmp_path, form, runs):
    content = sparse_file(tmp_path / "sparse", runs)
    (tmp_path / "z-after").write_bytes(b"after")
    data = subprocess.run(
        ["tar", "-c", "--sparse", *form, "-C", tmp_path, "sparse", "z-after"], check=True, capture_output=True
    ).stdout  # fmt: skip
    (sparse, found), (after, rest) = read(data)
    assert (sparse.name, sparse.size, after.name, rest) == (b"sparse", len(content), b"z-after", b"after")
    assert found == content
    assert sparse.stored <= runs * 4096 + 512 * 20


@pytest.mark.parametrize("broken", ["1,2,3", "0,10,5,10", "0,4096,8192,4096", "0,99999999999999999999", "a,b", "0,-1"])
def test_holes_that_cannot_be_are_refused(broken):
    info = tarfile.TarInfo("sparse")
    info.pax_headers = {"GNU.sparse.map": broken, "GNU.sparse.size": "10000", "GNU.sparse.name": "x"}
    with pytest.raises(InvalidArgument):
        read(write([(info, bytes(4096))]))


names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=150).filter(
    lambda name: not name.endswith("/") and name.strip("/") != ""
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    entries=st.lists(
        st.tuples(
            names,
            st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]),
            st.integers(0, 0o7777),
            st.integers(0, (1 << 32) - 2),
            st.integers(0, 1 << 33),
            st.binary(max_size=2000),
            names,
        ),
        max_size=8,
    ),
    form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    step=st.integers(1, 3000),
)
def test_what_the_standard_library_writes_is_read_as_it_was(entries, form, step):
    members = []
    for name, kind, mode, owner, mtime, content, link in entries:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.uid, info.gid, info.mtime = kind, mode, owner, owner // 2, mtime
        if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info.linkname = link
        if kind == tarfile.CHRTYPE:
            info.devmajor, info.devminor = owner % 4000, mtime % 100_000
        members.append((info, content if kind == tarfile.REGTYPE else b""))
    found = read(write(members, form, encoding="utf-8", errors="surrogateescape"), step)
    assert len(found) == len(members)
    for (info, content), (member, read_content) in zip(members, found, strict=True):
        # GNU's own fields are all that tarfile adds to a folder's name
        assert member.name.rstrip(b"/") == info.name.encode(errors="surrogateescape").rstrip(b"/")
        assert (member.mode, member.uid, member.gid) == (info.mode, info.uid, info.gid)
        assert member.mtime_ns == info.mtime * 1_000_000_000
        assert read_content == content
        kinds = {tarfile.REGTYPE: stat.S_IFREG, tarfile.DIRTYPE: stat.S_IFDIR, tarfile.SYMTYPE: stat.S_IFLNK, tarfile.LNKTYPE: HARD_LINK}
        if info.type in kinds:
            assert member.kind == kinds[info.type]
        if info.linkname:
            assert member.link == info.linkname.encode(errors="surrogateescape")
        if info.type == tarfile.CHRTYPE:
            assert (member.major, member.minor) == (info.devmajor, info.devminor)


def test_times_and_attributes_come_from_pax_headers():
    info = tarfile.TarInfo("x")
    info.pax_headers = {
        "mtime": "1700000000.123456789", "SCHILY.xattr.user.note": "a=b\nc", "LIBARCHIVE.xattr.user.bytes": "AP8", "hdrcharset": "BINARY",
        "comment": "c",
    }  # fmt: skip
    [(member, _)] = read(write([(info, b"")]))
    assert member.mtime_ns == 1_700_000_000_123_456_789
    assert member.xattrs == {b"user.note": b"a=b\nc", b"user.bytes": b"\0\xff"}


def test_global_headers_hold_for_all_members_that_say_nothing_else():
    own = tarfile.TarInfo("own")
    own.pax_headers = {"uid": "7"}
    data = write([(tarfile.TarInfo("plain"), b"1"), (own, b"2")], pax_headers={"uid": "5", "mtime": "9"})
    assert [(member.uid, member.mtime_ns) for member, _ in read(data)] == [(5, 9_000_000_000), (7, 9_000_000_000)]


def test_old_archives_are_read():
    header = bytearray(tarfile.TarInfo("old/folder/").tobuf(tarfile.USTAR_FORMAT))
    header[156:157] = b"\0"
    header[257:265] = bytes(8)  # before ustar
    header[100:108] = b"   755 \0"
    signed = bytearray(header)
    signed[0] = 0xE9  # some added up signed bytes
    for block, values in ((header, header), (signed, [byte - 256 if byte > 127 else byte for byte in signed])):
        block[148:156] = b"%06o\0 " % (sum(values[:148]) + sum(values[156:]) + 256)
    (first, _), (second, _) = read(bytes(header) + bytes(signed) + bytes(1024))
    assert (first.name, first.kind, first.mode) == (b"old/folder/", stat.S_IFDIR, 0o755)
    assert second.name == b"\xe9ld/folder/"


@pytest.mark.parametrize(
    ("start", "value"), [(100, b"9999999\0"), (108, b"12a4567\0"), (124, b"\x81" + bytes(11)), (124, b"\xff" * 12), (148, b"zzzzzz\0 ")]
)
def test_numbers_that_are_none_are_refused(start, value):
    data = bytearray(write([(tarfile.TarInfo("x"), b"")]))
    data[start : start + len(value)] = value
    if start != 148:
        data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 256)
    with pytest.raises(InvalidArgument):
        read(bytes(data))


def test_members_are_found_without_reading_their_contents(tmp_path):
    packed = tmp_path / "t"
    packed.write_bytes(write([(tarfile.TarInfo("a"), bytes(100_000)), (tarfile.TarInfo("b"), b"b" * 1000)]))
    with packed.open("rb", buffering=0) as file:
        source = Seekable(Extent(file.fileno()))
        places = {member.name: (source.offset, member.size) for member in TarReader(source)}
        offset, size = places[b"b"]
        assert os.pread(file.fileno(), size, offset) == b"b" * 1000
