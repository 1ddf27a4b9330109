"""A process by descriptor is that process or none."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile

import pytest

from dsec.kernel.pidfd import get_descriptor, has_ended, open_process, send_signal, start_ticks


@pytest.fixture
def sleeper():
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_signal_reaches_it_and_its_end_is_seen(sleeper):
    fd = open_process(sleeper.pid, start_ticks(sleeper.pid))
    try:
        assert not has_ended(fd)
        assert send_signal(fd, signal.SIGTERM)
        assert has_ended(fd, 10)
        assert sleeper.wait() == -signal.SIGTERM
        assert not send_signal(fd, signal.SIGTERM)
    finally:
        os.close(fd)


def test_one_with_another_start_time_is_another_process(sleeper):
    assert open_process(sleeper.pid, start_ticks(sleeper.pid) + 1) is None


def test_one_that_is_gone_is_none():
    with subprocess.Popen(["true"]) as process:
        pass
    assert open_process(process.pid) is None
    assert start_ticks(process.pid) is None


@pytest.mark.root
def test_its_open_file_can_be_shared():
    with tempfile.TemporaryFile() as file, subprocess.Popen(["sleep", "1000"], stdin=file) as process:
        fd = open_process(process.pid)
        try:
            copy = get_descriptor(fd, 0)
            assert os.fstat(copy).st_ino == os.fstat(file.fileno()).st_ino
            os.close(copy)
        finally:
            process.kill()
            os.close(fd)
