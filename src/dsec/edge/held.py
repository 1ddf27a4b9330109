"""Conversations that count as activity of their sandbox for as long as they are open."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec, TypeVar

from dsec.backends.protocol import Attachment, FilesConversation, OutputChunk, StreamEnd
from dsec.edge.core import Core
from dsec.edge.sandbox import Sandbox
from libdsec.errors import DSecError, OutcomeUnknown
from libdsec.schema import ExecResult, FileStat

__all__ = ["HeldAttachment", "HeldFiles"]

P = ParamSpec("P")
T = TypeVar("T")


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
    """A FilesConversation that tells a read which failed because the sandbox's store is lost from others.

    Whoever reads an open file's bytes does that without it, and closes it while his failure passes: so its end looks at that, too.
    """

    def __init__(self, core: Core, sandbox: Sandbox, inner: FilesConversation) -> None:
        self._hold = _Hold(core, sandbox)
        self._explain = partial(core.failed_reads.explain, sandbox, time.time())
        self._inner = inner
        self.stat = self._explained(inner.stat)
        self.open_read = self._explained(inner.open_read)
        # These read, too: what is below is copied up before it is changed.
        self.open_write = self._explained(inner.open_write)
        self.commit = self._explained(inner.commit)
        self.abort = inner.abort
        self.mkdir = self._explained(inner.mkdir)
        self.move = self._explained(inner.move)
        self.remove = self._explained(inner.remove)
        self.set_attributes = self._explained(inner.set_attributes)
        self.symlink = self._explained(inner.symlink)
        self.watch = inner.watch

    def _explained(self, call: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        async def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await call(*args, **kwargs)
            except DSecError as error:
                if (told := await self._explain(error)) is None:
                    raise
                raise told from error

        return explained

    async def list(self, path: str, *, recursive: bool = False) -> AsyncGenerator[FileStat, None]:
        """See FilesConversation.list."""
        try:
            async for entry in self._inner.list(path, recursive=recursive):
                yield entry
        except DSecError as error:
            if (told := await self._explain(error)) is None:
                raise
            raise told from error

    async def aclose(self) -> None:
        """Close, and let the sandbox be idle. SandboxFailed where that is what a failed read that passes means."""
        passing = sys.exception()
        self._hold.release()
        await self._inner.aclose()
        if isinstance(passing, OSError) and (told := await self._explain(passing)) is not None:
            raise told from passing
