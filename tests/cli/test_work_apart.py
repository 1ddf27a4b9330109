"""Work in a process of its own: what comes back from it, and what counts as getting nowhere."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from dsec.environments.apart import Apart
from libdsec.errors import DSecError, NotFound

pytestmark = pytest.mark.slow


def result(action, root, *, patience_seconds=10.0, **options):
    with Apart(action, root, patience_seconds=patience_seconds) as work:
        return work.result(**options)


def fail(error):
    raise error


def test_results_and_failures_come_back_whole(tmp_path):
    assert result(lambda _: {"a": os.getpid()}, tmp_path)["a"] != os.getpid()
    with pytest.raises(NotFound) as caught:
        result(lambda _: fail(NotFound("no such thing", field="name", details={"a": 1})), tmp_path)
    assert (caught.value.message, caught.value.field, caught.value.details) == ("no such thing", "name", {"a": 1})
    with pytest.raises(ZeroDivisionError) as bug:
        result(lambda _: 1 // 0, tmp_path)
    assert "test_work_apart.py" in bug.value.__notes__[0]
    with pytest.raises(DSecError, match="ended by signal 9"):
        result(lambda _: os.kill(os.getpid(), signal.SIGKILL), tmp_path)


def test_each_step_is_told_and_not_each_word(tmp_path):
    heard = []

    def work(told):
        for step in ("first", "second"):
            for number in range(1000):
                told(step, number, key=step)

    result(work, tmp_path, told=lambda *values: heard.append(values))
    assert [values for values in heard if values[1] == 0] == [("first", 0), ("second", 0)]
    assert len(heard) < 200


def test_one_call_that_gets_nowhere(tmp_path):
    """A pipe that nobody writes into; a living store is given more time for one call where such are known to be long."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TimeoutError, match=r"within 0.2 s"):
        result(lambda _: (tmp_path / "pipe").read_bytes(), tmp_path, patience_seconds=0.2)
    with pytest.raises(TimeoutError, match=r"within 2 s"):
        result(lambda _: (tmp_path / "pipe").read_bytes(), tmp_path, patience_seconds=0.2, long_calls=True)


def test_a_tool_may_take_its_time(tmp_path):
    began = time.monotonic()
    assert result(lambda _: subprocess.run(["sleep", "1.5"], check=True).returncode, tmp_path, patience_seconds=0.2) == 0
    assert time.monotonic() - began > 1.4


def test_what_is_left_early_cleans_up(tmp_path):
    def work(told):
        try:
            (tmp_path / "half").touch()
            told("begun")
            signal.pause()
        finally:
            (tmp_path / "half").unlink()

    def leave(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        result(work, tmp_path, told=leave)
    assert not (tmp_path / "half").exists()
