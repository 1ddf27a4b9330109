"""A server to kill: run as `python durable_server.py SOCKET FOLDER`.

Its commands are detached processes that leave their output in FOLDER, as aether keeps what runs when edge is gone; a new server over the
same folder knows them all again. That is all that a client needs of the real one to come through a kill -9.
"""

# ruff: noqa: ASYNC110, ASYNC220  (files and processes of a test, on a local disk)

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "apiserver"))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from edge_double import EdgeDouble

from dsec.apiserver import serve
from libdsec.errors import Conflict, NotFound
from libdsec.schema import ExecRequest, ExecResult, ProcessInfo, SandboxInfo


class DurableEdge(EdgeDouble):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.sandboxes["sb-durable"] = SandboxInfo(sandbox_id="sb-durable", backend="container", state="running")

    async def exec(self, sandbox_id: str, request: ExecRequest) -> ExecResult:
        await self._begin_durable(sandbox_id, request)
        return await self.result(sandbox_id, request.op_id or "", 3600)

    async def start(self, sandbox_id: str, request: ExecRequest) -> ProcessInfo:
        await self._begin_durable(sandbox_id, request)
        return await self.process(sandbox_id, request.op_id or "")

    async def _begin_durable(self, sandbox_id: str, request: ExecRequest) -> None:
        self._sandbox(sandbox_id)
        place = self.folder / (request.op_id or "")
        if not place.exists():
            # The process itself makes the record, so that there is none without a process, whenever the server is killed.
            script = 'mkdir "$2" && cd "$2" || exit; (eval "$1") >out 2>err; echo $? >.code; mv .code code'
            subprocess.Popen(["sh", "-c", script, "sh", request.shell or "", str(place)], start_new_session=True, stdin=subprocess.DEVNULL)
        while not place.exists():
            await asyncio.sleep(0.005)

    async def process(self, sandbox_id: str, op_id: str) -> ProcessInfo:
        place = self.folder / op_id
        if not place.is_dir():
            raise NotFound(f"no operation {op_id}", field="op_id")
        return ProcessInfo(op_id=op_id, sandbox_id=sandbox_id, state="exited" if (place / "code").exists() else "running")

    async def result(self, sandbox_id: str, op_id: str, wait: float = 0.0) -> ExecResult:
        until = asyncio.get_running_loop().time() + wait
        while (await self.process(sandbox_id, op_id)).state == "running":
            if asyncio.get_running_loop().time() >= until:
                raise Conflict(f"{op_id} still runs", cause="running")
            await asyncio.sleep(0.02)
        place = self.folder / op_id
        return ExecResult(op_id=op_id, exit_code=int((place / "code").read_text()), stdout=(place / "out").read_bytes())


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    uvloop.run(serve(DurableEdge(Path(sys.argv[2])), sys.argv[1]))
