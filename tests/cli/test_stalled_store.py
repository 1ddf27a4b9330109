"""Commands on a store that stalls: a FUSE file system whose server keeps the requests, from which no signal brings a thread back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# modules of other rooms are not importable under importlib mode
sys.path.insert(0, str(Path(__file__).parent.parent / "blobcache"))

from layers import SlowStore, eventually

from dsec.environments import EnvironmentStore, build

pytestmark = [pytest.mark.root, pytest.mark.slow]

PATIENCE = 0.5
MIB = 1 << 20
COMMANDS = [
    ["env", "ls"],
    ["env", "show", "one"],
    ["env", "history", "one"],
    ["env", "rm", "one"],
    ["env", "tree", "one"],
    ["env", "diff", "one", "two"],
    ["env", "build", "new", "--from", "dir:SOURCE"],
    ["env", "pull", "docker://127.0.0.1:9/x"],
    ["env", "trace", "one"],
    ["store", "df"],
    ["store", "gc"],
    ["store", "verify"],
]
every_command = pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words[:2]))


class Place:
    """A store with the environments `one` and `two`; `slow` shows it, or a folder of it, through the file system that can stall."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.store = tmp_path / "store"
        self.source = tmp_path / "source"
        self.source.mkdir()
        environments = EnvironmentStore(tmp_path / "builder", tmp_path / "builder/run", self.store)
        for name in ("one", "two"):
            (self.source / name).write_bytes(os.urandom(2 * MIB))
            build(environments, name, source=f"dir:{self.source}", kind="base")
        (self.source / "new").write_bytes(os.urandom(2 * MIB))
        self.slow: SlowStore | None = None

    def show(self, part: str = "") -> SlowStore:
        if part:
            (self.store / part).rename(self.folder / "kept")
            (self.store / part).mkdir()
            self.slow = SlowStore(self.folder / "kept", self.store / part, self.folder / "log")
        else:
            self.slow = SlowStore(self.store, self.folder / "seen", self.folder / "log")
        return self.slow

    def start(self, *words: str, patience: float = PATIENCE, whole: bool = True) -> subprocess.Popen[str]:
        environment = os.environ | {
            "DSEC_STATE": str(self.folder / "state"),
            "DSEC_RUN": str(self.folder / "run"),
            "DSEC_STORE": str(self.folder / "seen" if whole else self.store),
            "DSEC_STORE_PATIENCE": str(patience),
        }
        command = [sys.executable, "-m", "dsec.cli", *(word.replace("SOURCE", str(self.source)) for word in words)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *words: str, patience: float = PATIENCE, whole: bool = True, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """To the end of its outputs: who is left behind must not hold them."""
        with self.start(*words, patience=patience, whole=whole) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            finally:
                process.kill()
                if self.slow is not None and process.poll() is None:
                    self.slow.tell("stall 0")
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    if made.slow is not None:
        made.slow.close()


def family(pid):
    """The process and those below it."""
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from family(int(child))


def hangs(pid):
    """Whether it, or one below it, waits for the answer of a FUSE server."""
    for each in family(pid):
        for task in Path(f"/proc/{each}/task").glob("*/wchan"):
            with contextlib.suppress(OSError):
                if "request_wait_answer" in task.read_text():
                    return True
    return False


@every_command
def test_a_store_that_stalls_is_told_in_time(place, words):
    place.show().tell("stall 1")
    began = time.monotonic()
    done = place.run(*words, "--json", seconds=20)
    assert time.monotonic() - began < 15
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], error["cause"], error["field"]) == (1, "sandbox_failed", "store-lost", "store")
    assert f"did not answer within {PATIENCE:g} s" in error["message"]
    assert done.stderr == ""


@every_command
def test_ctrl_c_ends_it_while_the_store_hangs(place, words):
    slow = place.show()
    slow.tell("stall 1")
    with place.start(*words, patience=60) as process:
        try:
            eventually(lambda: hangs(process.pid), "it waits for the store")
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=10) == ("", "")
            assert (process.returncode, time.monotonic() - began < 3) == (130, True)
        finally:
            process.kill()
            slow.tell("stall 0")


@pytest.mark.parametrize(
    "words",
    [["store", "verify"], ["store", "df"], ["env", "tree", "one", "two"], ["env", "diff", "one", "two"], ["env", "ls"]],
    ids=lambda words: "-".join(words[:2]),
)
def test_a_store_that_is_slow_and_lives_is_waited_for(place, words):
    slow = place.show()
    slow.tell("delay 0.06")
    slow.tell(f"rate {2 * MIB}")
    began = time.monotonic()
    done = place.run(*words)
    assert (done.returncode, done.stderr.count("did not answer")) == (0, 0), done.stderr
    assert time.monotonic() - began > 2 * PATIENCE


def test_a_slow_collection_is_waited_for(place):
    slow = place.show("layers")
    slow.tell("delay 0.25")
    began = time.monotonic()
    done = place.run("store", "gc", "--json", whole=False)
    assert (done.returncode, json.loads(done.stdout)["layers"]) == (0, [])
    assert time.monotonic() - began > 2 * PATIENCE


def test_a_check_that_breaks_off_says_how_far_it_came(place):
    slow = place.show()
    slow.tell(f"rate {MIB}")
    with place.start("store", "verify") as process:
        try:
            eventually(lambda: any(offset >= MIB for _, offset, _ in slow.reads()), "a good part is read")
            slow.tell("stall 1")
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
            slow.tell("stall 0")
    assert (process.returncode, out) == (1, "")
    assert "did not answer" in err
    assert "MiB were read; nothing was changed" in err.replace("\n", " ")


def test_a_build_that_breaks_off_leaves_nothing_but_what_the_next_one_removes(place):
    """The packs alone hang: the store's other folders answer, and one call may take a living store longer."""
    before = json.loads(place.run("env", "show", "one", "--json", whole=False).stdout)
    slow = place.show("packs")
    slow.tell("stall 1")
    done = place.run("env", "build", "one", "--from", "dir:SOURCE", "--json", patience=0.2, whole=False)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["cause"]) == (1, "store-lost")
    assert "one means what it did before" in error["message"]
    slow.tell("stall 0")
    slow.close()
    place.slow = None
    (place.store / "packs").rmdir()
    (place.folder / "kept").rename(place.store / "packs")
    after = json.loads(place.run("env", "show", "one", "--json", whole=False).stdout)
    assert after["digest"] == before["digest"]
    again = place.run("env", "build", "one", "--from", "dir:SOURCE", "--json", whole=False)
    assert json.loads(again.stdout)["digest"] != before["digest"]
    assert os.listdir(place.store / "building") == []


def test_a_collection_that_breaks_off_is_gone_on_with(place):
    EnvironmentStore(place.folder / "builder", place.folder / "builder/run", place.store).remove("two")
    slow = place.show("layers")
    slow.tell("stall 1")
    done = place.run("store", "gc", "--grace", "0", patience=0.2, whole=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the next `dsec store gc` goes on" in done.stderr.replace("\n", " ")
    slow.close()
    place.slow = None
    (place.store / "layers").rmdir()
    (place.folder / "kept").rename(place.store / "layers")
    report = json.loads(place.run("store", "gc", "--grace", "0", "--json", whole=False).stdout)
    assert (len(report["layers"]), len(report["packs"]), report["skipped"]) == (1, 1, False)
    assert place.run("env", "show", "one", whole=False).returncode == 0
