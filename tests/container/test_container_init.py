"""What sits in a sandbox as its first process: next to nothing, and it reaps."""

from pathlib import Path

import pytest
from container_processes import init_of, status

pytestmark = pytest.mark.root


async def test_it_keeps_one_page_of_its_own_and_few_tables(boxes, until):
    init = init_of(await boxes())
    await until(lambda: status(init, "RssAnon") <= 4)
    assert status(init, "VmPTE") <= 16


async def test_it_has_its_name_and_no_descriptor(boxes, until):
    box = await boxes()
    assert await box.out("tr -d '\\0' < /proc/1/cmdline; echo; cat /proc/1/comm") == "init\ninit\n"
    await until(lambda: not list(Path(f"/proc/{init_of(box)}/fd").iterdir()))


async def test_it_reaps_what_is_left_to_it_and_no_signal_from_inside_reaches_it(box):
    count = "for stat in /proc/[0-9]*/stat; do grep -c ') Z ' $stat; done | grep -c 1"
    await box.out("i=0; while [ $i -lt 30 ]; do (true & exec true) & i=$((i+1)); done; wait")
    for signal in ("TERM", "SEGV", "CHLD", "KILL", "STOP"):
        await box.sh(f"kill -{signal} 1")
    assert await box.out(f"{count} || true") == "0\n"
    assert await box.out("echo lives") == "lives\n"
