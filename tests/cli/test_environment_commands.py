"""`dsec env` beyond building: what a name meant, what a layer is made of, in what two differ, images from archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def dsec(tmp_path: Path) -> Any:
    """Runs the command on a state folder of its own."""
    environment = {**os.environ, "DSEC_STATE": str(tmp_path / "state"), "DSEC_RUN": str(tmp_path / "run"), "COLUMNS": "400"}

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", "dsec.cli", *words], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == code, done.stderr
        return done.stdout

    return run


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    for entry in (path, *path.iterdir()):
        os.utime(entry, (0, 0))
    return path


def image(path: Path, *layers: dict[str, bytes]) -> Path:
    """A docker archive."""
    packed = []
    for files in layers:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        packed.append(buffer.getvalue())
    config = {
        "config": {"User": "app", "Cmd": ["serve"]},
        "rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(one).hexdigest() for one in packed]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": [f"{number}.tar" for number in range(len(packed))]}]
    with tarfile.open(path, "w") as archive:
        contents = {f"{number}.tar": gzip.compress(one) for number, one in enumerate(packed)}
        contents |= {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_the_history_of_a_name(dsec: Any, tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", a=b"1"), folder(tmp_path / "two", a=b"2")
    for source in (one, two, one):
        dsec("env", "build", "x:v", "--from", f"dir:{source}")
    entries = json.loads(dsec("env", "history", "x:v", "--json"))
    assert len({entry["digest"] for entry in entries}) == 2
    assert [entry["source"] for entry in entries] == [f"dir:{source}" for source in (one, two, one)]
    assert all(entry["kept"] for entry in entries)
    assert entries[0]["since"] >= entries[1]["since"] >= entries[2]["since"] > 0
    assert entries[1]["provenance"]["replaces"] == entries[2]["digest"]
    assert entries[1]["provenance"]["command"] == f"dsec env build x:v --from dir:{two}"
    assert json.loads(dsec("env", "show", f"x@{entries[1]['digest']}", "--json"))["source"] == f"dir:{two}"
    assert entries[0]["digest"] in dsec("env", "history", "x:v")
    dsec("env", "history", "other", code=3)


def test_the_layers_are_drawn_with_what_they_share(dsec: Any, tmp_path: Path) -> None:
    base, top, other = (os.urandom(50_000) for _ in range(3))
    dsec("env", "build", "first", "--from", f"oci:{image(tmp_path / 'a.tar', {'base': base}, {'top': top})}")
    dsec("env", "build", "second", "--from", f"oci:{image(tmp_path / 'b.tar', {'base': base}, {'other': other})}")
    [part] = json.loads(dsec("env", "tree", "first", "--json"))
    blocks = -(-50_000 // 4096) * 4096
    assert (part["data_bytes"], part["shared_bytes"], part["kind"]) == (2 * blocks, blocks, "base")
    assert [layer["data_bytes"] for layer in part["made_of"]] == [blocks, blocks]
    assert part["cached_bytes"] is None or 0 <= part["cached_bytes"] <= 2 * blocks
    assert "(50 %)" in dsec("env", "tree", "first")
    assert dsec("env", "tree", "first", "second").count("image layer") == 4
    dsec("env", "tree", "other", code=3)


def test_an_image_whose_layers_stay_apart(dsec: Any, tmp_path: Path) -> None:
    path = image(tmp_path / "a.tar", {"base": os.urandom(5000)}, {"top": os.urandom(5000)})
    info = json.loads(dsec("env", "build", "x", "--from", f"oci:{path}", "--collapse-below", "0", "--json"))
    assert (len(info["below"]), info["user"], info["command"]) == (1, "app", ["serve"])
    parts = json.loads(dsec("env", "tree", "x", "--json"))
    assert [part["digest"] for part in parts] == [*info["below"], info["digest"]]
    assert "+ /top" in dsec("env", "diff", f"x@{info['below'][0]}", "x")


def test_two_environments_are_compared_without_their_contents(dsec: Any, tmp_path: Path) -> None:
    big = os.urandom(5000)
    one = folder(tmp_path / "one", same=big, gone=b"g", content=big, mode=b"m")
    two = folder(tmp_path / "two", same=big, new=b"n", content=big[::-1], mode=b"m")
    (two / "mode").chmod(0o700)
    (two / "odd\nname").touch()
    os.utime(two / "same", (1, 1))
    for name, path in (("a", one), ("b", two)):
        dsec("env", "build", name, "--from", f"dir:{path}")
    found = {entry["path"]: (entry["change"], entry["aspects"]) for entry in json.loads(dsec("env", "diff", "a", "b", "--json"))}
    assert found.pop("/odd\nname") == ("+", [])
    assert found == {"/gone": ("-", []), "/new": ("+", []), "/content": ("~", ["content"]), "/mode": ("~", ["mode"])}
    assert "/same" in dsec("env", "diff", "a", "b", "--times")
    assert dsec("env", "diff", "a", "a") == ""
    dsec("env", "diff", "a", "other", code=3)


def test_a_registry_that_is_not_there_is_one_line(dsec: Any) -> None:
    done = json.loads(dsec("env", "pull", "docker://127.0.0.1:9/x", "--json", code=1))
    assert done["error"]["field"] == "source"
    assert done["error"]["cause"] in ("registry-unreachable", "tool-missing")
    dsec("env", "pull", "docker://-", code=2)


@pytest.mark.parametrize("words", [["ls"], ["show", "one"], ["history", "one"], ["rm", "one"]], ids=lambda words: words[0])
def test_a_store_that_hangs_is_told_and_can_be_left(dsec, tmp_path, words):
    """A pipe that nobody writes into stands for a file of a store that is away."""
    dsec("env", "build", "one", "--from", f"dir:{folder(tmp_path / 'source', a=b'a')}", "--kind", "base")
    (tag,) = (tmp_path / "state/store/tags/one").iterdir()
    tag.unlink()
    os.mkfifo(tag)
    command = [sys.executable, "-m", "dsec.cli", "env", *words]
    environment = {**os.environ, "DSEC_STATE": str(tmp_path / "state"), "DSEC_RUN": str(tmp_path / "run"), "COLUMNS": "400"}
    patience = environment | {"DSEC_STORE_PATIENCE": "0.3"}
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=patience, timeout=20)
    assert (told.returncode, "store did not answer within 0.3 s" in told.stderr) == (1, True), told
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as hanging:
        try:
            wait_until_it_hangs(hanging.pid)
            hanging.send_signal(signal.SIGINT)
            assert (hanging.wait(10), hanging.stderr.read()) == (130, b"")
        finally:
            hanging.kill()


def wait_until_it_hangs(pid: int) -> None:
    """Until a thread of the process that it has for the work is where the kernel waits for the other end of a pipe."""
    deadline = time.monotonic() + 10
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = [(task / "wchan").read_text() for child in children for task in Path(f"/proc/{child}/task").iterdir()]
        if "wait_for_partner" in names:
            return
        assert time.monotonic() < deadline, names
        time.sleep(0.01)
