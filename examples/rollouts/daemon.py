"""The job's own `dsec up`: started on a run folder of its own, stopped at the end whatever happens."""

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

from libdsec import DSecClient, DSecError, NotFound

__all__ = ["RUN_MARK", "DaemonError", "serving", "stop_all"]

_START_SECONDS = 60
_STOP_SECONDS = 60
RUN_MARK = "DSEC_RUN"


class DaemonError(Exception):
    """`dsec up` did not come up, or ended by itself."""


@contextlib.asynccontextmanager
async def serving(state: Path) -> AsyncIterator[tuple[DSecClient, Path]]:
    """A running server on `state`; a client of it and its run folder. At the end all its sandboxes are stopped, then the server.

    If a run before this one was killed, its run folder is taken over: the server finds the sandboxes left there, and they are stopped.
    """
    note = state / "run-folder"
    run = _left_over(note) or Path(tempfile.mkdtemp(prefix="dsec-rollouts-", dir="/run" if os.access("/run", os.W_OK) else None))
    note.write_text(str(run))
    try:
        async with _process(state, run), DSecClient(f"unix://{run}/dsec.sock") as client:
            try:
                await stop_all(client)
                yield client, run
            finally:
                await _through(stop_all(client))
    finally:
        _remove_run_folder(run, note)


async def stop_all(client: DSecClient) -> None:
    """Stop every sandbox of the server that is not stopped yet."""
    live = [info.sandbox_id for info in await client.list() if info.state not in ("stopped", "failed")]

    async def stop(sandbox_id: str) -> None:
        with contextlib.suppress(NotFound):
            await (await client.get(sandbox_id)).stop()

    await asyncio.gather(*map(stop, live))


async def _through(work: Coroutine[None, None, None]) -> None:
    """Finish the work even if this task is cancelled meanwhile; then let the cancellation go on."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


@contextlib.asynccontextmanager
async def _process(state: Path, run: Path) -> AsyncIterator[None]:
    log_path = state / "dsec.log"
    with log_path.open("wb") as log:
        # A session of its own: the terminal's Ctrl-C is for the job, which then stops the sandboxes first.
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "dsec.cli", "up"],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"DSEC_STATE": str(state), RUN_MARK: str(run)},
            start_new_session=True,
        )
    try:
        await _wait_until_up(process, run, log_path)
        yield
    finally:
        await _through(_end(process))


async def _wait_until_up(process: asyncio.subprocess.Process, run: Path, log: Path) -> None:
    ended = asyncio.ensure_future(process.wait())
    try:
        async with asyncio.timeout(_START_SECONDS):
            while True:
                if (run / "dsec.sock").exists():
                    try:
                        async with DSecClient(f"unix://{run}/dsec.sock"):
                            return
                    except DSecError:
                        pass
                await asyncio.wait([ended], timeout=0.05)
                if ended.done():
                    raise DaemonError(f"dsec up ended with {process.returncode}:\n{_tail(log)}")
    except TimeoutError:
        raise DaemonError(f"dsec up did not answer within {_START_SECONDS} s:\n{_tail(log)}") from None
    finally:
        ended.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _left_over(note: Path) -> Path | None:
    """The run folder of a run that was killed, its server ended."""
    try:
        run = Path(note.read_text())
    except FileNotFoundError:
        return None
    if not run.is_dir():
        return None
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"dsec.cli" in words and f"{RUN_MARK}={run}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                pidfd = os.pidfd_open(int(pid))
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)
    return run


def _remove_run_folder(run: Path, note: Path) -> None:
    """Remove what holds no mount; a mount that is left keeps the folder, and the check at the end shows it."""
    mounted = any(f" {run}/" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    if not mounted:
        shutil.rmtree(run, ignore_errors=True)
        note.unlink(missing_ok=True)
