"""A process's handle: started, watched, fed, signalled, waited for; found again by its id."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from libdsec import streaming
from libdsec.api import Api, segment
from libdsec.bodies import check_seconds
from libdsec.errors import Conflict, NotFound, SandboxFailed
from libdsec.schema import ExecResult, ProcessInfo, SignalRequest, StreamOutput
from libdsec.shielding import finish
from libdsec.signals import signal_number
from libdsec.stream import ProcessStream

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Process"]


class Process:
    """A command that was started. It needs no handle to go on: `sandbox.process(op_id)` makes another.

    output(), write_stdin(), close_stdin() and resize() share one stream, opened when first needed. `async with` ends the process's whole
    tree at exit if it still runs.
    """

    op_id: str
    started: ProcessInfo

    def __init__(self, api: Api, sandbox_path: str, info: ProcessInfo) -> None:
        self._api = api
        self._sandbox_path = sandbox_path
        self._path = f"{sandbox_path}/processes/{segment(info.op_id)}"
        self._stream: ProcessStream | None = None
        self._opening = asyncio.Lock()
        self._iterating = False
        self.started = info
        self.op_id = info.op_id

    def __repr__(self) -> str:
        return f"<Process {self.op_id}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await finish(self._end())

    async def _end(self) -> None:
        try:
            # It may end, or go with its sandbox, while it is being asked about.
            with contextlib.suppress(Conflict, NotFound, SandboxFailed):
                if (await self.info()).state == "running":
                    await self.kill()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Let go of the stream, if there is one. The process goes on."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.aclose()

    async def info(self) -> ProcessInfo:
        """Whether it runs, and its result without the output."""
        return await self._api.call("GET", self._path, ProcessInfo, idempotent=True)

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """The result with the kept output. After `timeout` seconds OutcomeUnknown with cause `timeout`; the process goes on.

        Output that waits unread on this handle's stream is dropped from there, so that it holds up nothing; the result has what was kept.
        """
        check_seconds(timeout=timeout)
        draining: asyncio.Task[None] | None = None
        if self._stream is not None and not self._iterating:
            draining = asyncio.get_running_loop().create_task(self._stream.drain())
        try:
            until = None if timeout is None else asyncio.get_running_loop().time() + timeout
            return await self._api.recorded(self._sandbox_path, self.op_id, until)
        finally:
            if draining is not None:
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)

    async def signal(self, signal: int | str, *, tree: bool = False) -> None:
        """Send a signal, by number or name, to the leader, or to all of the command's processes."""
        request = SignalRequest(signal=signal_number(signal), tree=tree)
        await self._api.call("POST", self._path + "/signal", type(None), body=request)

    async def terminate(self) -> None:
        """Ask the whole tree to end (TERM)."""
        await self.signal("TERM", tree=True)

    async def kill(self) -> None:
        """End the whole tree now (KILL)."""
        await self.signal("KILL", tree=True)

    def attach(self, *, stdout_offset: int = 0, stderr_offset: int = 0, credit: int = streaming.DEFAULT_CREDIT) -> ProcessStream:
        """A stream of its own, for `async with`. Offsets ask for output from there on, as far as it was kept."""
        return ProcessStream(self._api, self._path, stdout_offset=stdout_offset, stderr_offset=stderr_offset, credit=credit)

    async def _shared(self) -> ProcessStream:
        async with self._opening:
            if self._stream is None:
                self._stream = await self.attach().open()
            return self._stream

    async def output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """`(stream, data)` as it comes, 1 for stdout and 2 for stderr, from the beginning, until the process ends. Read it once."""
        stream = await self._shared()
        self._iterating = True
        try:
            async for piece in stream:
                yield piece
        finally:
            self._iterating = False

    async def kept_output(self, stream: int = 1, *, offset: int = 0, limit: int = 1 << 20) -> StreamOutput:
        """What is kept of a stream from `offset` on, at most `limit` bytes, now: for polling, where a stream would be too much."""
        query = {"stream": stream, "offset": offset, "limit": limit}
        return await self._api.call("GET", self._path + "/output", StreamOutput, query=query, idempotent=True)

    async def output_text(self, *, errors: str = "replace") -> AsyncGenerator[tuple[int, str], None]:
        """output() as UTF-8 text. A character that was cut between two pieces comes whole, with the later one."""
        decoders = {stream: codecs.getincrementaldecoder("utf-8")(errors) for stream in (1, 2)}
        async for stream, data in self.output():
            text = decoders[stream].decode(data)
            if text:
                yield stream, text
        for stream, decoder in decoders.items():
            if text := decoder.decode(b"", final=True):
                yield stream, text

    async def write_stdin(self, data: bytes | str) -> None:
        """Send input to a process started with `open_stdin` or `tty`; waits while it does not read."""
        await (await self._shared()).write_stdin(data)

    async def close_stdin(self) -> None:
        """End of input."""
        await (await self._shared()).close_stdin()

    async def resize(self, rows: int, cols: int) -> None:
        """Tell the terminal's size to a process started with `tty`."""
        await (await self._shared()).resize(rows, cols)
