"""A birth that fails, or is given up, at its very beginning leaves nothing: neither in the making, nor open, nor counted."""

import asyncio
import contextlib
import errno
import gc
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from dsec.resources.hierarchies import probe
from dsec.resources.plan import instance_dirs, instance_name
from libdsec.errors import DSecError

pytestmark = pytest.mark.root


def traces(home, sandbox_id):
    found = [str(path) for path in home.run.rglob(f"*{sandbox_id}*")]
    found += [path for parent in instance_dirs(probe(), instance_name(home.run)) if os.path.exists(path := f"{parent}/{sandbox_id}")]
    found += [str(path) for path in (home.state / "scratch").glob(sandbox_id)]
    return found


def open_files():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


async def test_a_birth_cancelled_before_its_preparing_has_had_a_turn_waits_for_its_thread(boxes, home, monkeypatch):
    await boxes()  # The launcher is there, so that a birth sends LAUNCH without a turn of the loop.
    scratch = boxes.backend._scratch
    began, ended = threading.Event(), threading.Event()
    create = scratch.create

    def slowly(*args, **options):
        began.set()
        time.sleep(0.3)
        try:
            return create(*args, **options)
        finally:
            ended.set()

    monkeypatch.setattr(scratch, "create", slowly)
    spec = boxes.spec()
    task = asyncio.ensure_future(boxes.backend.create(spec))
    await asyncio.sleep(0)  # To where it waits for `preparing`, whose own task has not run yet.
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    still_making = not ended.is_set()
    if await asyncio.to_thread(began.wait, 0.5):
        await asyncio.to_thread(ended.wait, 5)
    left = traces(home, spec.sandbox_id)
    for path in left:
        await boxes.backend.destroy_unknown(Path(path).name)
    assert (still_making and began.is_set(), left) == (False, [])


async def test_a_birth_for_which_no_descriptor_is_left_is_counted_no_more(boxes, monkeypatch):
    await boxes()
    backend = boxes.backend

    def none_left(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", none_left)
        patched.setattr(socket.socket, "dup", none_left)
        with pytest.raises(DSecError) as caught:
            await backend.create(boxes.spec())
    del caught
    gc.collect()
    assert backend._births == 0, "no later birth is alone any more"


async def test_a_birth_for_which_no_thread_can_be_had_leaves_no_descriptor(boxes, monkeypatch):
    await boxes()
    backend = boxes.backend
    loop = asyncio.get_running_loop()
    real = loop.run_in_executor

    def refuse(pool, function, *args):
        if "_prepare" in repr(function):
            raise RuntimeError("can't start new thread")
        return real(pool, function, *args)

    before = open_files()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "run_in_executor", refuse)
        with pytest.raises(DSecError) as caught:
            await backend.create(boxes.spec())
    del caught
    gc.collect()
    await asyncio.sleep(0.3)
    left = [what for number, what in open_files().items() if number not in before]
    assert (backend._births, left) == (0, [])
