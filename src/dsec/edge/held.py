"""Conversations that count as activity of their sandbox for as long as they are open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from dsec.backends.protocol import Attachment, FilesConversation, OutputChunk, StreamEnd
from dsec.edge.core import Core
from dsec.edge.sandbox import Sandbox
from libdsec.errors import OutcomeUnknown
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
    """An Attachment that ends with the result wherever there is one: a conversation that breaks is carried on from the record.

    `record` gives the rest from offsets on, or raises what it is given where the command has not ended. `left` is called once at the end.
    """

    def __init__(
        self,
        core: Core,
        sandbox: Sandbox,
        inner: Attachment,
        offsets: dict[int, int],
        record: Callable[[dict[int, int], OutcomeUnknown], Awaitable[Attachment]],
        left: Callable[[], None],
    ) -> None:
        self._hold = _Hold(core, sandbox)
        self._inner = inner
        self._items = inner.__aiter__()
        self._offsets = offsets
        self._record = record
        self._left: Callable[[], None] | None = left
        self._broken = False
        self._finished = False
        self.consumed = inner.consumed
        self.write_stdin = inner.write_stdin
        self.close_stdin = inner.close_stdin
        self.signal = inner.signal
        self.resize = inner.resize

    def __aiter__(self) -> AsyncIterator[OutputChunk | StreamEnd | ExecResult]:
        return self

    async def __anext__(self) -> OutputChunk | StreamEnd | ExecResult:
        if self._finished:
            raise StopAsyncIteration
        try:
            item = await anext(self._items)
        except (StopAsyncIteration, OutcomeUnknown) as error:
            reason = error if isinstance(error, OutcomeUnknown) else OutcomeUnknown("the live view broke off", cause="detached")
            if self._broken:
                raise reason from error
            self._items = (await self._record(self._offsets, reason)).__aiter__()
            self._broken = True
            item = await anext(self._items)
        if isinstance(item, OutputChunk):
            self._offsets[item.stream] = item.offset + len(item.data)
        self._finished = isinstance(item, ExecResult)
        return item

    async def aclose(self) -> None:
        """Close, and let the sandbox be idle."""
        self._hold.release()
        left, self._left = self._left, None
        await self._inner.aclose()
        if left is not None:
            left()


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
