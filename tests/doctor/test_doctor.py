"""What doctor says of a host is what is so, and it leaves nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dsec.doctor import all_probes, examine
from dsec.doctor.probing import Absent, Probe, run_probe


def probe(run, **fields) -> Probe:
    return Probe("thing", run, "use", "loss", "remedy", **fields)


def test_a_probe_that_sees_its_mechanism_is_present_and_needs_no_remedy() -> None:
    found = run_probe(probe(lambda _folder: "seen"))
    assert (found.present, found.detail, found.remedy) == (True, "seen", "")


@pytest.mark.parametrize(
    ("failing", "detail"),
    [
        (lambda _folder: (_ for _ in ()).throw(Absent("no such thing")), "no such thing"),
        (lambda _folder: Path("/nowhere/at/all").read_text(), "/nowhere/at/all: No such file or directory"),
        (lambda _folder: 1 // 0, "ZeroDivisionError"),
        (lambda _folder: os.kill(os.getpid(), 9), "the probe died"),
    ],
    ids=["absent", "os-error", "bug", "crash"],
)
def test_a_probe_that_fails_in_any_way_is_an_answer(failing, detail: str) -> None:
    found = run_probe(probe(failing))
    assert not found.present
    assert detail in found.detail
    assert found.remedy == "remedy"


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.doctor.probing.DEADLINE_SECONDS", 0.05)
    found = run_probe(probe(lambda _folder: os.system("sleep 60; true") or ""))
    assert not found.present
    assert "no answer" in found.detail


def test_the_folder_of_a_probe_is_gone_after_it() -> None:
    found = run_probe(probe(lambda folder: (folder / "file").write_text("x") and str(folder)))
    assert found.present
    assert not Path(found.detail).exists()


@pytest.mark.root
@pytest.mark.slow
def test_all_probes_are_quick_and_change_nothing() -> None:
    def view() -> tuple[str, list[str], set[str]]:
        groups = [str(path) for path in Path("/sys/fs/cgroup").rglob("dsec-doctor*")]
        loops = {path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file") if "dsec-doctor" in path.read_text()}
        return "".join(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "dsec-doctor" in line), groups, loops

    started = time.monotonic()
    findings = examine()
    assert time.monotonic() - started < 3
    assert [finding.mechanism for finding in findings] == [each.mechanism for each in all_probes()]
    assert view() == ("", [], set())
    by_name = {finding.mechanism: finding for finding in findings}
    assert by_name["root"].present
    assert by_name["namespaces, pivot_root"].present, by_name["namespaces, pivot_root"].detail


def test_every_probe_says_what_it_is_for() -> None:
    for each in all_probes():
        assert each.used_for
        assert each.without
        assert each.remedy
