"""A process ends with the work that ends in time, and without that which hangs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow
BEGIN = """
import asyncio, contextlib, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from dsec.edge.ending import Ending

end = Ending()

def hang():
    os.read(os.pipe()[0], 1)

def write():
    time.sleep(1)
    os.write(1, b"written to its end")
"""
LINE = "calls that have not ended are abandoned"


def run(text):
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, timeout=60, check=False)
    return done, time.monotonic() - begun


@pytest.mark.parametrize("daemon", [True, False])
def test_a_write_that_ends_in_time_is_not_cut_short(daemon):
    done, _ = run(f"""
async def work():
    import threading
    threading.Thread(target=write, daemon={daemon}).start()

with end.process():
    asyncio.run(end.after(work()))
""")
    assert (done.returncode, done.stdout) == (0, "written to its end")
    assert LINE not in done.stdout + done.stderr


def test_a_call_that_waits_for_the_loop_gets_it():
    done, _ = run("""
async def late():
    await asyncio.sleep(0.5)
    return b"answered"

async def work():
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, lambda: os.write(1, asyncio.run_coroutine_threadsafe(late(), loop).result()))

with end.process():
    asyncio.run(end.after(work()))
""")
    assert (done.returncode, done.stdout) == (0, "answered")


@pytest.mark.parametrize(("how", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", 130), ("1 / 0", 1)])
def test_what_hangs_is_left_with_one_line_and_the_exit_code_stays(how, code):
    done, seconds = run(f"""
async def work():
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, hang)
    end.renew()
    # the next call does not queue behind it, and what was printed is not lost
    print(await loop.run_in_executor(None, lambda: "done"))

with end.process():
    asyncio.run(end.after(work()))
    {how}
""")
    assert (done.returncode, done.stdout.splitlines()[0]) == (code, "done")
    lines = [line for line in (done.stdout + done.stderr).splitlines() if LINE in line]
    assert len(lines) == 1
    assert "dsec-loop_0" in lines[0]
    assert seconds < 20
    assert ("ZeroDivisionError" in done.stderr) == (how == "1 / 0")


def test_threads_that_wait_for_work_are_nothing_to_wait_for():
    done, seconds = run("""
pool = ThreadPoolExecutor(2)

async def work():
    await asyncio.get_running_loop().run_in_executor(pool, int)

with end.process():
    asyncio.run(end.after(work()))
""")
    assert (done.returncode, LINE in done.stdout + done.stderr) == (0, False)
    assert seconds < 3
