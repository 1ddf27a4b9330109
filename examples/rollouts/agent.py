"""The line between a policy outside and the harness inside: JSON lines over a process of the sandbox."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Agent", "HarnessLost", "HarnessProcess", "Step", "ToolFailed"]

_MAX_LINE = 4 * 1024 * 1024


class HarnessProcess(Protocol):
    """The part of the SDK's process handle that is needed here."""

    async def write_stdin(self, data: bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    def output(self) -> AsyncIterator[tuple[int, bytes]]: ...


class HarnessLost(Exception):
    """The harness is gone or talks nonsense: the trajectory ends here."""


class ToolFailed(Exception):
    """The tool could not do what was asked; the policy may try otherwise."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a tool, as the trajectory keeps it."""

    tool: str
    args: dict[str, Any]
    ok: bool
    result: Any
    seconds: float


@dataclass(slots=True)
class Agent:
    """Calls tools in one sandbox, one after the other, and keeps the steps. Not for use by two tasks at once."""

    process: HarnessProcess
    max_steps: int = 60
    call_seconds: float = 150.0
    steps: list[Step] = field(default_factory=list)
    errors: bytearray = field(default_factory=bytearray)
    _lines: AsyncIterator[bytes] | None = None

    async def call(self, tool: str, /, **args: Any) -> Any:
        """The tool's result. Raises `ToolFailed` with the tool's own words, `HarnessLost` where no answer comes any more."""
        if len(self.steps) >= self.max_steps:
            raise HarnessLost(f"more than {self.max_steps} steps")
        started = time.monotonic()
        number = len(self.steps) + 1
        reply = await self._exchange({"id": number, "tool": tool, "args": args})
        ok, result = bool(reply.get("ok")), reply.get("result" if reply.get("ok") else "error")
        self.steps.append(Step(tool, args, ok, result, time.monotonic() - started))
        if not ok:
            raise ToolFailed(str(result))
        return result

    async def run(self, command: str, *, timeout: float = 60.0) -> str:
        """Output of a shell command, whatever its exit code."""
        return str((await self.call("run", command=command, timeout=timeout))["output"])

    async def close(self) -> None:
        """Half-close: the harness ends at end of input."""
        await self.process.close_stdin()

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._lines is None:
            self._lines = self._read_lines()
        try:
            async with asyncio.timeout(self.call_seconds):
                await self.process.write_stdin(json.dumps(request).encode() + b"\n")
                line = await anext(self._lines)
            reply = json.loads(line)
        except StopAsyncIteration:
            said = bytes(self.errors[-500:]).decode(errors="replace").strip()
            raise HarnessLost(f"the harness ended{': ' + said if said else ''}") from None
        except TimeoutError:
            raise HarnessLost(f"no answer within {self.call_seconds:g} s") from None
        except ValueError:
            raise HarnessLost("the answer is not JSON") from None
        if not isinstance(reply, dict) or reply.get("id") != request["id"]:
            raise HarnessLost("the answer is to another question")
        return reply

    async def _read_lines(self) -> AsyncIterator[bytes]:
        buffer = bytearray()
        async for stream, data in self.process.output():
            if stream != 1:
                self.errors += data
                del self.errors[:-4096]
                continue
            buffer += data
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                yield line
            if len(buffer) > _MAX_LINE:
                raise HarnessLost("an answer without end")
