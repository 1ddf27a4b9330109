"""Conversations that count as activity of their sandbox for as long as they are open."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dsec.backends.protocol import Attachment, FilesConversation, OutputChunk, StreamEnd
from dsec.edge.core import Core
from dsec.edge.sandbox import Sandbox
from libdsec.schema import ExecResult

__all__ = ["HeldAttachment", "HeldFiles"]


class _Hold:
    __slots__ = ("_core", "_sandbox")

    def __init__(self, core: Core, sandbox: Sandbox) -> None:
        self._core = core
        self._sandbox: Sandbox | None = sandbox
        core.begin_activity(sandbox)

    def release(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._core.end_activity(sandbox)


class HeldAttachment:
    """An Attachment."""

    def __init__(self, core: Core, sandbox: Sandbox, inner: Attachment) -> None:
        self._hold = _Hold(core, sandbox)
        self._inner = inner
        self.consumed = inner.consumed
        self.write_stdin = inner.write_stdin
        self.close_stdin = inner.close_stdin
        self.signal = inner.signal
        self.resize = inner.resize

    def __aiter__(self) -> AsyncIterator[OutputChunk | StreamEnd | ExecResult]:
        return self._inner.__aiter__()

    async def aclose(self) -> None:
        """Close, and let the sandbox be idle."""
        self._hold.release()
        await self._inner.aclose()


class HeldFiles:
    """A FilesConversation."""

    def __init__(self, core: Core, sandbox: Sandbox, inner: FilesConversation) -> None:
        self._hold = _Hold(core, sandbox)
        self._inner = inner
        self.stat = inner.stat
        self.list = inner.list
        self.open_read = inner.open_read
        self.open_write = inner.open_write
        self.commit = inner.commit
        self.abort = inner.abort
        self.mkdir = inner.mkdir
        self.move = inner.move
        self.remove = inner.remove
        self.set_attributes = inner.set_attributes
        self.symlink = inner.symlink
        self.watch = inner.watch

    async def aclose(self) -> None:
        """Close, and let the sandbox be idle."""
        self._hold.release()
        await self._inner.aclose()
