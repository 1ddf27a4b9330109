"""The job's own `dsec up`: started on a run folder of its own, ended with all its sandboxes whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

from libdsec import DSecClient, DSecError, Timeouts

__all__ = ["RUN_MARK", "DaemonError", "make_run_folder", "remove_run_folder", "serving"]

_START_SECONDS = 60
_STOP_SECONDS = 90
RUN_MARK = "DSEC_RUN"
_NOTE = "run-folder"


class DaemonError(Exception):
    """`dsec up` did not come up, or ended by itself."""


@contextlib.asynccontextmanager
async def serving(state: Path, run: Path) -> AsyncIterator[DSecClient]:
    """A client of a server on these two folders. At the end, a cancellation included, the server stops its sandboxes, unmounts and ends."""
    log = state / "dsec.log"
    process = await _start("up", "--rm", state=state, run=run, log=log)
    try:
        await _wait_until_up(process, run, log)
        try:
            # Nobody starts it again if it dies, so there is no use in waiting for it long.
            async with DSecClient(f"unix://{run}/dsec.sock", timeouts=Timeouts(reconnect=3.0)) as client:
                yield client
        except Exception as error:
            if process.returncode is not None:
                raise DaemonError(f"dsec up ended with {process.returncode}:\n{_tail(log)}") from error
            raise
    finally:
        await _through(_end(process, state, run))


async def make_run_folder(state: Path) -> Path:
    """A fresh run folder, noted in the state folder. What a job that was killed has left behind is ended first."""
    note = state / _NOTE
    if (earlier := _noted(note)) is not None:
        await _dsec_down(state, earlier)
        remove_run_folder(state, earlier)
    run = Path(tempfile.mkdtemp(prefix="dsec-rollouts-", dir="/run" if os.access("/run", os.W_OK) else None))
    note.write_text(str(run))
    return run


def remove_run_folder(state: Path, run: Path) -> None:
    """Remove it, unless something is mounted in it: that stays to be seen, and for the next job to end."""
    if f" {run}/" not in Path("/proc/self/mountinfo").read_text():
        shutil.rmtree(run, ignore_errors=True)
        (state / _NOTE).unlink(missing_ok=True)


def _noted(note: Path) -> Path | None:
    try:
        run = Path(note.read_text())
    except FileNotFoundError:
        return None
    return run if run.is_dir() else None


async def _start(*arguments: str, state: Path, run: Path, log: Path) -> asyncio.subprocess.Process:
    # The log is of one job: begun anew by its server, what ends it is added.
    with log.open("wb" if "up" in arguments else "ab") as output:
        # A session of its own: the terminal's Ctrl-C is for the job, which ends the server when its own work is undone.
        return await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "dsec.cli", *arguments],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Settings of the user's own server (store, scratch, token) are not for this one.
            env={name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
            | {"DSEC_STATE": str(state), RUN_MARK: str(run)},
            start_new_session=True,
        )


async def _wait_until_up(process: asyncio.subprocess.Process, run: Path, log: Path) -> None:
    ended = asyncio.ensure_future(process.wait())
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not await _answers(run):
                await asyncio.wait([ended], timeout=0.05)
                if ended.done():
                    raise DaemonError(f"dsec up ended with {process.returncode}:\n{_tail(log)}")
    except TimeoutError:
        raise DaemonError(f"dsec up did not answer within {_START_SECONDS} s:\n{_tail(log)}") from None
    finally:
        ended.cancel()


async def _answers(run: Path) -> bool:
    with contextlib.suppress(DSecError):
        async with DSecClient(f"unix://{run}/dsec.sock"):
            return True
    return False


async def _end(process: asyncio.subprocess.Process, state: Path, run: Path) -> None:
    """Ask it to end; where it does not, or has died, `dsec down` does what it would have done."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
    if process.returncode:
        await _dsec_down(state, run)


async def _dsec_down(state: Path, run: Path) -> None:
    down = await _start("down", state=state, run=run, log=state / "dsec.log")
    try:
        await asyncio.wait_for(down.wait(), _STOP_SECONDS)
    except TimeoutError:
        down.kill()
        await down.wait()


async def _through(work: Coroutine[None, None, None]) -> None:
    """Finish the work even if this task is cancelled meanwhile; the cancellation goes on afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
