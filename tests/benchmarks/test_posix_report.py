"""What the POSIX run makes of prove's words."""

from __future__ import annotations

from benchmarks.posix import DEVICES, judge, parse, without_devices

SAID = """/opt/pjdfstest/tests/chmod/00.t ....
1..3
ok 1
not ok 2 - tried 'chmod', expected 0, got EPERM
not ok 3 # TODO Linux makes no difference
/opt/pjdfstest/tests/mknod/02.t ....
1..2
not ok 1 - tried 'mknod', expected 0, got EPERM
ok 2
All 2 tests done
"""


def test_failures_are_counted_by_file_and_todo_is_none() -> None:
    assert parse(SAID) == {"chmod/00.t": (3, frozenset({2})), "mknod/02.t": (2, frozenset({1}))}


def test_a_difference_to_the_reference_is_explained_or_not() -> None:
    good = {"chmod/00.t": (3, frozenset[int]()), "mknod/02.t": (2, frozenset[int]())}
    found = {one["file"]: one["why"] for one in judge({"sandbox": parse(SAID), "host": good}, "host")}
    assert found == {"chmod/00.t": None, "mknod/02.t": DEVICES}


def test_a_run_that_broke_off_differs() -> None:
    assert [one["ran"] for one in judge({"sandbox": {}, "host": {"chmod/00.t": (3, frozenset())}}, "host")] == [0]


def test_loops_over_types_lose_devices_and_nothing_else() -> None:
    text = "for type in regular dir fifo block char socket symlink; do\n\tcreate_file block ${n0}\n\tfor type2 in none block char; do\n"
    assert without_devices(text) == (
        "for type in regular dir fifo socket symlink; do\n\tcreate_file block ${n0}\n\tfor type2 in none; do\n"
    )
