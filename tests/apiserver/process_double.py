"""Processes of the edge double: real child processes with kept output, attachments with credit, a shell session."""

# ruff: noqa: ASYNC240  (a double's few file calls may block)

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

from dsec.backends.protocol import OutputChunk, StreamEnd
from libdsec.errors import Conflict, InvalidArgument
from libdsec.schema import ExecRequest, ExecResult

CHUNK = 64 << 10


class ProcessDouble:
    """One child. Output is kept whole; an attachment sends what its credit allows."""

    def __init__(self, op_id: str, request: ExecRequest) -> None:
        self.op_id = op_id
        self.request = request
        self.kept = {1: bytearray(), 2: bytearray()}
        self.ended = {1: False, 2: False}
        self.result: ExecResult | None = None
        self.changed = asyncio.Condition()
        self.pid: int | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self.rows = (request.rows, request.cols)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> ExecResult:
        argv = self.request.argv or ["sh", "-c", self.request.shell or ""]
        started = time.time()
        open_stdin = self.request.open_stdin or self.request.stdin is not None
        self.process = process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if open_stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.request.cwd,
            env={**os.environ, **self.request.env},
        )
        self.pid = process.pid
        self.ready.set()
        if self.request.stdin is not None:
            process.stdin.write(self.request.stdin)
            process.stdin.close()
        timed_out = False
        try:
            async with asyncio.timeout(self.request.timeout):
                await asyncio.gather(self._keep(1, process.stdout), self._keep(2, process.stderr))
                code = await process.wait()
        except TimeoutError:
            timed_out = True
            process.kill()
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            # A grandchild may still hold the pipes.
            process._transport.close()
            raise
        if process.stdin is not None:
            process.stdin.close()
        self.result = ExecResult(
            op_id=self.op_id,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=timed_out,
            stdout=bytes(self.kept[1]),
            stderr=bytes(self.kept[2]),
            stdout_bytes=len(self.kept[1]),
            stderr_bytes=len(self.kept[2]),
            started_at=started,
        )
        async with self.changed:
            self.ended = {1: True, 2: True}
            self.changed.notify_all()
        return self.result

    async def _keep(self, stream: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK):
            async with self.changed:
                self.kept[stream] += data
                self.changed.notify_all()
        async with self.changed:
            self.ended[stream] = True
            self.changed.notify_all()


class AttachmentDouble:
    def __init__(self, process: ProcessDouble, stdout_offset: int, stderr_offset: int, credit: int) -> None:
        self.process = process
        self.offsets = {1: stdout_offset, 2: stderr_offset}
        self.credit = {1: credit, 2: credit}
        self.closed = False
        self.most_unconsumed = 0
        self.stdin_gate: asyncio.Event | None = None

    def _next(self) -> OutputChunk | StreamEnd | ExecResult | None:
        process = self.process
        for stream in (1, 2):
            offset = self.offsets.get(stream)
            if offset is None:
                continue
            data = bytes(process.kept[stream][offset : offset + min(CHUNK, self.credit[stream])])
            if data:
                self.offsets[stream] += len(data)
                self.credit[stream] -= len(data)
                return OutputChunk(stream, offset, data)
            if process.ended[stream] and offset >= len(process.kept[stream]):
                del self.offsets[stream]
                return StreamEnd(stream)
        if not self.offsets and process.result is not None:
            return process.result
        return None

    async def __aiter__(self) -> AsyncIterator[OutputChunk | StreamEnd | ExecResult]:
        while True:
            async with self.process.changed:
                while (item := self._next()) is None:
                    await self.process.changed.wait()
            yield item
            if isinstance(item, ExecResult):
                return

    async def consumed(self, stream: int, count: int) -> None:
        async with self.process.changed:
            self.credit[stream] += count
            self.process.changed.notify_all()

    async def write_stdin(self, data: bytes) -> None:
        stdin = self.process.process.stdin
        if stdin is None or stdin.is_closing():
            raise Conflict("stdin is closed", cause="stdin-closed")
        try:
            stdin.write(data)
            await stdin.drain()
        except ConnectionError:
            raise Conflict("stdin is closed", cause="stdin-closed") from None

    async def close_stdin(self) -> None:
        if self.process.process.stdin is not None:
            self.process.process.stdin.close()

    async def signal(self, signum: int, *, tree: bool) -> None:
        send_signal(self.process, signum)

    async def resize(self, rows: int, cols: int) -> None:
        self.process.rows = (rows, cols)

    async def aclose(self) -> None:
        self.closed = True


def send_signal(process: ProcessDouble, signum: int) -> None:
    if process.result is not None:
        raise Conflict("the command has ended", cause="exited")
    process.process.send_signal(signum)


class SessionDouble:
    """A shell that is told its commands on stdin and answers with a marker and the exit code."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lock = asyncio.Lock()

    @classmethod
    async def open(cls, cwd: str | None) -> SessionDouble:
        if cwd is not None and not os.path.isdir(cwd):
            raise InvalidArgument(f"{cwd} is not there", field="cwd")
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec("sh", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, cwd=cwd))

    async def run(self, op_id: str, command: str) -> ExecResult:
        async with self.lock:
            self.process.stdin.write(f"{command}\nprintf '\\n%s %s\\n' {op_id} $?\n".encode())
            lines = []
            while not (line := await self.process.stdout.readline()).startswith(op_id.encode()):
                lines.append(line)
            output = b"".join(lines)[:-1]
            return ExecResult(op_id=op_id, exit_code=int(line.split()[1]), stdout=output, stdout_bytes=len(output))

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.process._transport.close()
