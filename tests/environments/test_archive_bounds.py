"""Small archives that would take much memory, disk or time."""

from __future__ import annotations

import lzma
import os
import resource
import shutil
import tarfile

import pytest
from layouts import Layout, file, tar_of

from dsec.environments import build
from dsec.environments.sources.builder import TreeBuilder
from dsec.environments.sources.bytestreams import Chunked
from dsec.environments.sources.streams import Extent, decompressed
from dsec.environments.sources.tar import TarReader
from dsec.environments.sources.view import View
from dsec.environments.trees import Node, folder
from libdsec.errors import InvalidArgument, QuotaExceeded

MIB = 1 << 20


def header(kind, data):
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def record(key, value):
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


def members(*pieces):
    end = tarfile.TarInfo("plain").tobuf(tarfile.USTAR_FORMAT) + bytes(1024)
    return list(TarReader(Chunked(iter([*pieces, end]))))


MANY = b"".join(record(b"%x" % number, b"") for number in range(100_000))
HEADERS = {
    "many records": lambda: [header(tarfile.XHDTYPE, MANY)],
    "many records in many headers": lambda: [
        header(tarfile.XHDTYPE, b"".join(record(b"%x.%x" % (part, number), b"") for number in range(10_000))) for part in range(8)
    ],
    "many records for all": lambda: [header(tarfile.XGLTYPE, b"".join(record(b"%x" % number, b"") for number in range(2_000)))],
    "much for all": lambda: [header(tarfile.XGLTYPE, record(b"comment.%d" % number, bytes(MIB // 2))) for number in range(4)],
    "many headers": lambda: [header(tarfile.XHDTYPE, record(b"comment", bytes(MIB)))] * 20,
    "many long names": lambda: [header(tarfile.GNUTYPE_LONGNAME, b"n" * MIB)] * 20,
    "many holes": lambda: [header(tarfile.XHDTYPE, record(b"GNU.sparse.map", b"," * (4 * MIB)))],
    "holes one by one": lambda: [header(tarfile.XHDTYPE, record(b"GNU.sparse.numbytes", b"1") * 300_000)],
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers_have_bounds(what):
    with pytest.raises(InvalidArgument) as caught:
        members(*HEADERS[what]())
    assert caught.value.cause == "archive"


def test_what_honest_writers_say_is_within_them():
    said = header(tarfile.XGLTYPE, record(b"comment", b"0" * 40))
    own = header(tarfile.XHDTYPE, b"".join(record(b"SCHILY.xattr.user.%d" % number, b"v" * 500) for number in range(100)))
    [member] = members(said, own)
    assert len(member.xattrs) == 100


def xz(data, dictionary):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": dictionary}]
    return lzma.compress(data, filters=filters)


def unpacked(path):
    with path.open("rb", buffering=0) as opened, decompressed(Extent(opened.fileno()), lambda done, total: None) as stream:
        return b"".join(stream)


@pytest.mark.parametrize("form", [lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_streams_of_xz_follow_each_other(tmp_path, form):
    parts = [os.urandom(3 * MIB), b"", b"a" * MIB]
    packed = [lzma.compress(part, format=form) for part in parts]
    (tmp_path / "x").write_bytes((bytes(8) if form == lzma.FORMAT_XZ else b"").join(packed[: None if form == lzma.FORMAT_XZ else 1]))
    assert unpacked(tmp_path / "x") == (b"".join(parts) if form == lzma.FORMAT_XZ else parts[0])


def test_xz_that_wants_a_gigabyte_is_refused(tmp_path):
    data = lzma.compress(b"x" * 1000, format=lzma.FORMAT_ALONE)
    (tmp_path / "x").write_bytes(data[:1] + (1 << 30).to_bytes(4, "little") + data[5:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument) as caught:
        unpacked(tmp_path / "x")
    assert caught.value.cause == "archive"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.root
def test_a_compressed_image_is_written_out_within_what_the_disk_has(store, tmp_path, monkeypatch):
    layout = Layout(tmp_path / "layout").image([tar_of(file("a", bytes(4 * MIB)))], compress=lambda data: data)
    layout.write()
    with tarfile.open(tmp_path / "image.tar.gz", "w:gz") as archive:
        archive.add(layout.path, ".")
    build(store, "whole", source=f"oci:{tmp_path / 'image.tar.gz'}")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=2 * MIB))
    with pytest.raises(QuotaExceeded) as caught:
        build(store, "image", source=f"oci:{tmp_path / 'image.tar.gz'}")
    assert caught.value.cause == "disk"
    assert os.listdir(store.staging.root) == []


def wandering(links):
    """Links each of which goes back and forth before it goes on to the next."""
    root = folder()
    root.children[b"d"] = folder()
    for number in range(links):
        target = b"d/../" * 800 + (b"l%d" % (number + 1) if number + 1 < links else b"d")
        root.children[b"l%d" % number] = Node(0o120777, target=target)
    return root


def test_links_that_lead_far_about_are_refused():
    builder = TreeBuilder()
    builder.root = wandering(30)
    with pytest.raises(InvalidArgument, match="about"):
        builder.put(b"l0/file", Node(0o100644, inline=b""))
    assert View([wandering(30)]).follow([b"l0"]) is None
    assert View([wandering(1)]).follow([b"l0", b"x"]) is None


def test_honest_chains_work():
    root = folder()
    root.children[b"d"] = folder()
    for number in range(20):
        root.children[b"l%d" % number] = Node(0o120777, target=b"./l%d" % (number + 1) if number < 19 else b"d")
    builder = TreeBuilder()
    builder.root = root
    builder.put(b"l0/file", Node(0o100644, inline=b""))
    assert b"file" in root.children[b"d"].children
