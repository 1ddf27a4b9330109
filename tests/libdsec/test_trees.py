"""Tar streams from a sandbox: nothing in them is believed."""

from __future__ import annotations

import io
import os
import tarfile

import pytest

from libdsec import InvalidArgument
from libdsec.trees import pack, unpack


def member(name, kind=tarfile.REGTYPE, data=b"", target="", mode=0o644):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.size = kind, target, mode, len(data)
    return made, data


def archive(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def pieces(data, size=1000):
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.fixture
def places(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    return root, outside


async def test_what_is_packed_is_unpacked(places):
    root, source = places
    (source / "d").mkdir(mode=0o700)
    (source / "d" / os.fsdecode(b"caf\xe9")).write_bytes(b"x" * 600_000)
    (source / "d" / ("n" * 200)).write_bytes(b"")
    os.mkfifo(source / "d" / "pipe")
    (source / "link").symlink_to("d")
    os.utime(source / "d" / ("n" * 200), (1000, 1000))
    await unpack(pack(str(source)), str(root))
    assert sorted(os.listdir(os.fsencode(root / "d"))) == sorted([b"caf\xe9", b"n" * 200])
    assert (root / "d" / os.fsdecode(b"caf\xe9")).stat().st_size == 600_000
    assert (root / "d" / ("n" * 200)).stat().st_mtime == 1000
    assert (root / "d").stat().st_mode & 0o777 == 0o700
    assert os.readlink(root / "link") == "d"


@pytest.mark.parametrize(
    "members",
    [
        [member("../outside/x", data=b"1")],
        [member("a/../../outside/x", data=b"1")],
        [member("link", tarfile.SYMTYPE, target="../outside"), member("link/x", data=b"1")],
        [member("d", tarfile.DIRTYPE), member("d/l", tarfile.SYMTYPE, target="../../outside"), member("d/l/m/x", data=b"1")],
        [member("link", tarfile.SYMTYPE, target="../outside"), member("link", tarfile.DIRTYPE, mode=0o777)],
    ],
)
async def test_what_leads_outside_is_refused(places, members):
    root, outside = places
    with pytest.raises(InvalidArgument):
        await unpack(pieces(archive(*members)), str(root))
    assert list(outside.iterdir()) == []
    assert outside.stat().st_mode & 0o777 != 0o777


async def test_links_are_replaced_not_followed(places):
    root, outside = places
    (outside / "victim").write_bytes(b"old")
    link = member("x", tarfile.SYMTYPE, target="../outside/victim")
    await unpack(pieces(archive(link, member("x", data=b"new"))), str(root))
    assert (outside / "victim").read_bytes() == b"old"
    assert (root / "x").read_bytes() == b"new"
    assert not (root / "x").is_symlink()


async def test_absolute_names_devices_and_special_bits_are_tamed(places):
    root, _ = places
    stream = archive(
        member("/etc/passwd", data=b"inside"),
        member("dev", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
        member("hard", tarfile.LNKTYPE, target="/etc/shadow"),
        member("suid", data=b"", mode=0o6755),
    )
    await unpack(pieces(stream), str(root))
    assert sorted(os.listdir(root)) == ["etc", "suid"]
    assert (root / "etc/passwd").read_bytes() == b"inside"
    assert (root / "suid").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("damage", [b"", b"garbage" * 300, None])
async def test_damage_is_told(places, damage):
    root, _ = places
    stream = archive(member("x", data=b"y" * 100_000))[:50_000] if damage is None else damage
    with pytest.raises(InvalidArgument):
        await unpack(pieces(stream), str(root))


async def test_a_source_that_fails_is_the_failure_that_is_told(places):
    root, _ = places

    async def broken():
        yield archive(member("x", data=b"y" * 100_000))[:5000]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await unpack(broken(), str(root))
    with pytest.raises(InvalidArgument) as caught:
        await unpack(pack(str(root / "none")), str(root))
    assert caught.value.field == "local"


async def test_who_stops_reading_ends_the_packing(places):
    _, source = places
    (source / "big").write_bytes(bytes(20 << 20))
    packing = pack(str(source))
    assert len(await anext(packing)) > 0
    await packing.aclose()
