"""The way into one live sandbox: dsec.backends.protocol.Channel over aether's Unix socket, one connection per conversation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from dsec.backends.container import wire
from dsec.backends.container.commands import CommandConversation, ContainerAttachment
from dsec.backends.container.conversation import Conversation, RequestConversation, connect
from dsec.backends.container.failures import channel_closed
from dsec.backends.container.files import ContainerFiles
from dsec.backends.container.frames import Fields, MalformedFrame, encode_fields, encode_frame
from dsec.backends.container.requests import (
    EXEC_CREDIT,
    INLINE_STDIN,
    exec_payload,
    live_session,
    run_payload,
    shell_payload,
    started_session,
)
from dsec.backends.container.watch import Watch
from dsec.backends.protocol import LiveSession
from libdsec.errors import InvalidArgument, NotFound, OutcomeUnknown
from libdsec.schema import ExecRequest, ExecResult, SessionRequest, SessionRunRequest

__all__ = ["ContainerChannel"]

HELD_RESULTS: Final = 64

T = TypeVar("T")


class ContainerChannel:
    """See the protocol for each call's contract. `watch` brings the events and is let go by `aclose`."""

    def __init__(self, path: str, watch: Watch | None = None) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._open: weakref.WeakSet[Conversation] = weakref.WeakSet()
        self._results: dict[str, CommandConversation] = {}
        self._closed = False

    @property
    def socket_path(self) -> str:
        return self._path

    def _require_open(self) -> None:
        if self._closed:
            raise channel_closed("the channel was let go", "not-run")

    async def _request(self, kind: int, payload: bytes, *, fds: bool = False) -> RequestConversation:
        """A conversation whose first frame was sent; the caller reads the answer and closes it."""
        self._require_open()
        conversation = RequestConversation(self._loop, await connect(self._path), self._path, fds=fds, first=encode_frame(kind, payload))
        self._open.add(conversation)
        return conversation

    async def _ask(self, kind: int, payload: bytes, expect: int = wire.OK) -> Fields:
        conversation = await self._request(kind, payload)
        try:
            answer = await conversation.next()
        finally:
            conversation.close()
        if answer[0] != expect:
            raise MalformedFrame(f"aether answered kind {kind} with kind {answer[0]}, not {expect}")
        return Fields(answer[2])

    async def _command(
        self,
        kind: int,
        payload: bytes,
        op_id: str,
        *,
        limit_seconds: float | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        self._require_open()
        frame = encode_frame(kind, payload)
        sock = await connect(self._path)
        conversation = CommandConversation(self._loop, sock, self._path, op_id, limit_seconds=limit_seconds, stdin=stdin, first=frame)
        self._open.add(conversation)
        try:
            result = await conversation.result
        except BaseException:
            conversation.close()
            raise
        self._hold(op_id, conversation)
        return result

    def _hold(self, op_id: str, conversation: CommandConversation) -> None:
        """Keep the connection until the result is acknowledged, or until too many are kept: then it only costs a fresh one."""
        former = self._results.pop(op_id, None)
        if former is not None:
            former.close()
        if not conversation.closed:
            self._results[op_id] = conversation
            if len(self._results) > HELD_RESULTS:
                self._results.pop(next(iter(self._results))).close()

    async def exec(self, op_id: str, request: ExecRequest) -> ExecResult:
        payload = exec_payload(op_id, request, live=False, credit=EXEC_CREDIT)
        limit = None if request.timeout is None else request.timeout + request.kill_grace
        stdin = request.stdin if request.stdin is not None and len(request.stdin) > INLINE_STDIN else None
        return await self._command(wire.EXEC, payload, op_id, limit_seconds=limit, stdin=stdin)

    async def start(self, op_id: str, request: ExecRequest) -> LiveSession:
        if request.stdin is not None and len(request.stdin) > INLINE_STDIN:
            raise InvalidArgument(
                f"stdin of a started command is at most {INLINE_STDIN} bytes; open stdin and write the rest", field="stdin"
            )
        fields = await self._ask(wire.EXEC, exec_payload(op_id, request, live=True, credit=0), wire.STARTED)
        return started_session(op_id, "command", fields, background=request.background)

    async def attach(
        self, op_id: str, *, session_id: str | None = None, stdout_offset: int = 0, stderr_offset: int = 0, credit: int = 4 << 20
    ) -> ContainerAttachment:
        payload = encode_fields(
            [
                (wire.T_SESSION_ID, session_id or op_id),
                (wire.T_OP_ID, op_id),
                (wire.T_STDOUT_OFFSET, stdout_offset),
                (wire.T_STDERR_OFFSET, stderr_offset),
                (wire.T_LIVE, 1),
                (wire.T_CREDIT_BYTES, credit),
            ]
        )

        async def attach() -> ContainerAttachment:
            self._require_open()
            sock = await connect(self._path)
            attachment = ContainerAttachment(
                self._loop, sock, self._path, op_id, credit=credit, stdout_offset=stdout_offset, stderr_offset=stderr_offset
            )
            self._open.add(attachment)
            attachment.send(encode_frame(wire.ATTACH, payload))
            try:
                await attachment.started
            except BaseException:
                attachment.close()
                raise
            return attachment

        return await _twice(attach)

    async def wait(self, op_id: str, *, session_id: str | None = None) -> ExecResult:
        payload = encode_fields(
            [(wire.T_SESSION_ID, session_id or op_id), (wire.T_OP_ID, op_id), (wire.T_LIVE, 0), (wire.T_CREDIT_BYTES, EXEC_CREDIT)]
        )
        return await _twice(lambda: self._command(wire.ATTACH, payload, op_id))

    async def signal(self, session_id: str, signum: int, *, tree: bool) -> None:
        await self._ask(wire.SIGNAL, encode_fields([(wire.T_SESSION_ID, session_id), (wire.T_SIGNUM, signum), (wire.T_TREE, int(tree))]))

    async def acknowledge(self, session_id: str, op_id: str) -> None:
        payload = encode_fields([(wire.T_SESSION_ID, session_id), (wire.T_OP_ID, op_id)])
        held = self._results.pop(op_id, None)
        if held is None or not held.acknowledge(payload):
            # Not known means forgotten already.
            with contextlib.suppress(NotFound):
                await _twice(lambda: self._ask(wire.ACK, payload))

    async def open_session(self, session_id: str, request: SessionRequest) -> LiveSession:
        fields = await self._ask(wire.SHELL, shell_payload(session_id, request), wire.STARTED)
        return started_session(session_id, "shell", fields)

    async def run_in_session(self, session_id: str, op_id: str, request: SessionRunRequest) -> ExecResult:
        return await self._command(wire.RUN, run_payload(session_id, op_id, request), op_id)

    async def close_session(self, session_id: str) -> None:
        await self._ask(wire.CLOSE, encode_fields([(wire.T_SESSION_ID, session_id)]))

    async def sessions(self) -> list[LiveSession]:
        conversation = await self._request(wire.HELLO, b"")
        live: list[LiveSession] = []
        try:
            while True:
                kind, _, payload, _ = await conversation.next()
                if kind == wire.OK:
                    return live
                if kind == wire.SESSION:
                    live.append(live_session(Fields(payload)))
                elif kind not in (wire.READY, wire.EVENT):
                    raise MalformedFrame(f"aether answered HELLO with kind {kind}")
        finally:
            conversation.close()

    async def files(self, user: str) -> ContainerFiles:
        return await ContainerFiles.open(self._open_files, user)

    async def _open_files(self, user: str) -> RequestConversation:
        conversation = await self._request(wire.FILES, encode_fields([(wire.T_USER, user)]), fds=True)
        try:
            answer = await conversation.next()
            if answer[0] != wire.OK:
                raise MalformedFrame(f"aether answered FILES with kind {answer[0]}")
        except BaseException:
            conversation.close()
            raise
        return conversation

    async def connect(self, port: int, address: str = "127.0.0.1") -> int:
        if not 1 <= port <= 65535:
            raise InvalidArgument(f"port must be between 1 and 65535, not {port}", field="port")
        payload = encode_fields([(wire.T_PORT, port), (wire.T_ADDRESS, address)])
        conversation = await self._request(wire.CONNECT, payload, fds=True)
        try:
            await conversation.next()
            fd = conversation.take_fd()
        finally:
            conversation.close()
        if fd is None:
            raise OutcomeUnknown("aether answered CONNECT without a descriptor")
        os.set_blocking(fd, False)
        return fd

    def silence(self) -> None:
        """The end that is coming is wanted: no `closed` event for it. Conversations under way still get their answers."""
        if self._watch is not None:
            self._watch.close()

    async def aclose(self) -> None:
        self._closed = True
        self._results.clear()
        if self._watch is not None:
            self._watch.close()
        for conversation in list(self._open):
            if not conversation.closed:
                conversation.lose(channel_closed("the channel was let go", "unknown"))


async def _twice(question: Callable[[], Awaitable[T]]) -> T:
    """Ask again where a connection was lost: a session that ends as it is asked drops it unread, and aether then knows what became of it.

    Only for what changes nothing.
    """
    try:
        return await question()
    except OutcomeUnknown:
        return await question()
