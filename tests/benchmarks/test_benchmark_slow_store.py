"""The store that is far away: it passes everything through, and takes the time that it says."""

from __future__ import annotations

import os
import threading
import time

import pytest

from benchmarks.slowstore import SlowStore, StoreTraffic, compile_slow_store

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def mount(tmp_path):
    program = compile_slow_store(tmp_path)
    source = tmp_path / "source"
    source.mkdir()

    def mount(**limits):
        return SlowStore.mounted(program, source, tmp_path / "mount", **({"mb_per_s": 1000, "request_ms": 0.01} | limits))

    mount.source = source
    return mount


def test_what_is_done_there_is_done_in_the_folder(mount):
    with mount() as slow:
        top = slow.target
        (top / "folder").mkdir(mode=0o750)
        (top / "folder/file").write_bytes(b"content")
        (top / "folder/file").chmod(0o640)
        os.link(top / "folder/file", top / "twin")
        os.symlink("folder/file", top / "link")
        os.truncate(top / "twin", 4)
        (top / "going").write_text("")
        (top / "going").unlink()
        (top / "folder/file").rename(top / "moved")
        for number in range(300):
            (top / f"many-{number}").touch()
        os.utime(top / "moved", ns=(1, 2_000_000_003))
        assert len(os.listdir(top)) == 304
        with (top / "moved").open("r+b") as file:
            os.fsync(file.fileno())
        assert (top / "link").readlink().name == "file"
        with pytest.raises(FileNotFoundError):
            (top / "absent").stat()
    source = mount.source
    assert not os.path.ismount(slow.target)
    assert (source / "moved").read_bytes() == b"cont"
    assert (source / "moved").stat().st_ino == (source / "twin").stat().st_ino
    assert (source / "moved").stat().st_mtime_ns == 2_000_000_003
    assert oct((source / "moved").stat().st_mode & 0o7777) == "0o640"
    assert oct((source / "folder").stat().st_mode & 0o7777) == "0o750"
    assert len(os.listdir(source)) == 304


def test_bytes_come_at_the_set_rate_however_many_read(mount):
    size = 8 << 20
    for name in "abcd":
        (mount.source / name).write_bytes(os.urandom(size // 4))
    with mount(mb_per_s=20) as slow:
        readers = [threading.Thread(target=(slow.target / name).read_bytes) for name in "abcd"]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        took = time.perf_counter() - started
        traffic = slow.traffic()
    assert traffic.bytes_read == size
    assert traffic.busy_ns >= size / 20e6 * 1e9
    assert size / 20e6 <= took, "no faster than the line"


def test_each_request_takes_its_time_and_many_wait_at_once(mount):
    for number in range(20):
        (mount.source / str(number)).touch()
    with mount(request_ms=50) as slow:
        started = time.perf_counter()
        for number in range(3):
            (slow.target / str(number)).stat()
        in_turn = time.perf_counter() - started
        lookers = [threading.Thread(target=(slow.target / str(number)).stat) for number in range(10, 20)]
        started = time.perf_counter()
        for looker in lookers:
            looker.start()
        for looker in lookers:
            looker.join()
        together = time.perf_counter() - started
    assert in_turn >= 3 * 0.05
    assert 0.05 <= together < 10 * 0.05


def test_a_new_mount_knows_nothing_of_an_earlier_one(mount):
    (mount.source / "file").write_bytes(os.urandom(1 << 20))
    for _ in range(2):
        with mount() as slow:
            (slow.target / "file").read_bytes()
            once = slow.traffic()
            (slow.target / "file").read_bytes()
            again = slow.traffic().since(once)
        assert once.bytes_read == 1 << 20
        assert again.bytes_read == 0, "within one mount the page cache has it"


def test_traffic_is_told_in_megabytes():
    document = StoreTraffic(10, 4, 2_000_000, 1, 500_000, 3_000_000_000).since(StoreTraffic(1, 0, 0, 0, 0, 0)).to_json()
    assert document == {
        "requests": 9,
        "read_requests": 4,
        "read_mb": 2.0,
        "kb_each_read": 500.0,
        "written_mb": 0.5,
        "line_busy_s": 3.0,
    }
