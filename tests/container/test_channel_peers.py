"""The edge's side of the channel against peers that hang, lie, hang up or are not there. Real sockets, no sandbox."""

import asyncio
import contextlib
import os
import socket
import threading

import pytest

from dsec.backends.container import wire
from dsec.backends.container.channel import ContainerChannel
from dsec.backends.container.commands import CommandConversation
from dsec.backends.container.conversation import Conversation
from dsec.backends.container.frames import FrameDecoder, MalformedFrame, encode_data, encode_fields, encode_frame
from dsec.backends.container.removal import stop
from libdsec.errors import Conflict, DSecError, OutcomeUnknown, SandboxFailed
from libdsec.schema import ExecRequest


class Peer:
    """Listens like an aether; `answer(connection, frames)` is called once with each connection's first frames."""

    def __init__(self, path, answer):
        self.path = str(path)
        self.answer = answer
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(16)
        self.connections = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            self.connections.append(connection)
            data = connection.recv(1 << 20)
            if not data:
                continue
            with contextlib.suppress(OSError):
                self.answer(connection, FrameDecoder().feed(data))

    def stop_listening(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def close(self):
        with contextlib.suppress(OSError):
            self.stop_listening()
        self.thread.join(10)
        for connection in self.connections:
            connection.close()


@pytest.fixture
async def peer(tmp_path):
    """Gives a channel to a peer that answers as told."""
    peers, channels = [], []

    def make(answer):
        peers.append(Peer(tmp_path / f"peer{len(peers)}.sock", answer))
        channels.append(ContainerChannel(peers[-1].path))
        return channels[-1]

    make.peers = peers
    yield make
    for channel in channels:
        await channel.aclose()
    for each in peers:
        await asyncio.to_thread(each.close)


def silent(connection, frames):
    pass


def hang_up(connection, frames):
    """But prove to be alive when asked."""
    if frames and frames[0][0] == wire.HELLO:
        connection.sendall(encode_frame(wire.READY))
    connection.shutdown(socket.SHUT_RDWR)


def sending(*frames):
    return lambda connection, _: connection.sendall(b"".join(frames))


EXITED = encode_frame(wire.EXITED, encode_fields([(wire.T_EXIT_CODE, 0), (wire.T_STDOUT_TOTAL, 5)]))


async def test_a_peer_that_never_answers_is_given_up(peer, monkeypatch):
    monkeypatch.setattr(Conversation, "answer_seconds", 0.1)
    monkeypatch.setattr(CommandConversation, "kill_slack_seconds", 0.1)
    channel = peer(silent)
    for call in (
        channel.start("op", ExecRequest(argv=["true"])),
        channel.attach("op"),
        channel.signal("op", 15, tree=False),
        channel.sessions(),
        channel.files("root"),
        channel.connect(80),
        channel.exec("op", ExecRequest(argv=["true"], timeout=0.0, kill_grace=0.0)),
    ):
        with pytest.raises(SandboxFailed) as caught:
            await asyncio.wait_for(call, 5)
        assert (caught.value.cause, caught.value.ran) == ("channel-closed", "unknown")


async def test_stopping_a_peer_that_never_answers_gives_up_without_an_error(peer, monkeypatch):
    monkeypatch.setattr("dsec.backends.container.removal.STOP_SECONDS", 0.1)
    peer(silent)
    assert await asyncio.wait_for(stop(peer.peers[0].path), 5) is None


async def test_a_conversation_that_breaks_while_the_peer_listens_is_an_unknown_outcome(peer):
    with pytest.raises(OutcomeUnknown):
        await peer(hang_up).exec("op", ExecRequest(argv=["true"]))


async def test_a_conversation_that_breaks_with_the_peer_is_a_failed_sandbox(peer):
    def die(connection, frames):
        peer.peers[0].stop_listening()
        hang_up(connection, frames)

    with pytest.raises(SandboxFailed) as caught:
        await peer(die).exec("op", ExecRequest(argv=["true"]))
    assert (caught.value.cause, caught.value.ran) == ("channel-closed", "unknown")


async def test_a_peer_that_listens_without_answering_is_dead(peer, monkeypatch):
    monkeypatch.setattr("dsec.backends.container.conversation.PROOF_SECONDS", 0.1)

    def die(connection, frames):
        if frames[0][0] == wire.EXEC:
            connection.shutdown(socket.SHUT_RDWR)

    with pytest.raises(SandboxFailed) as caught:
        await peer(die).exec("op", ExecRequest(argv=["true"]))
    assert (caught.value.cause, caught.value.ran) == ("channel-closed", "unknown")


async def test_nobody_there_means_that_nothing_ran(tmp_path):
    for path in (tmp_path / "none.sock", tmp_path):
        with pytest.raises(SandboxFailed) as caught:
            await ContainerChannel(str(path)).exec("op", ExecRequest(argv=["true"]))
        assert (caught.value.cause, caught.value.ran) == ("channel-closed", "not-run")


async def test_output_that_is_cut_off_before_the_end_is_no_success(peer):
    def cut(connection, frames):
        if frames[0][0] == wire.EXEC:
            connection.sendall(encode_data(1, 0, b"partial") + EXITED[:-3])
        hang_up(connection, frames)

    with pytest.raises(OutcomeUnknown):
        await peer(cut).exec("op", ExecRequest(argv=["true"]))


async def test_a_view_that_breaks_while_it_is_waited_for_is_no_end(peer):
    """Whoever waits is told why once that is known, and not that all is over as soon as the connection is."""

    def start(connection, frames):
        if frames[0][0] == wire.ATTACH:
            connection.sendall(encode_frame(wire.STARTED, encode_fields([(wire.T_SESSION_ID, "op")])))
        else:
            hang_up(connection, frames)

    attachment = await peer(start).attach("op")
    waiting = asyncio.ensure_future(anext(attachment))
    await asyncio.sleep(0)
    peer.peers[0].connections[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(OutcomeUnknown):
        await anext(attachment)


async def test_a_question_whose_connection_is_dropped_is_asked_again(peer):
    asked = []

    def drop_once(connection, frames):
        if frames[0][0] == wire.ACK:
            asked.append(frames[0])
            if len(asked) > 1:
                connection.sendall(encode_frame(wire.OK))
                return
        hang_up(connection, frames)

    await peer(drop_once).acknowledge("op", "op")
    assert len(asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode_frame(wire.READY),
        encode_frame(wire.EXITED, b"\xff" * 9),
        encode_frame(wire.CREDIT, b"1"),
    ],
    ids=["http", "wrong-kind", "bad-fields", "cut-number"],
)
async def test_an_answer_that_makes_no_sense_is_an_error_not_a_result(peer, answer):
    channel = peer(lambda connection, frames: (connection.sendall(answer), hang_up(connection, frames)))
    with pytest.raises((OutcomeUnknown, SandboxFailed, MalformedFrame)):
        await asyncio.wait_for(channel.exec("op", ExecRequest(argv=["true"])), 5)


async def test_errors_of_the_peer_keep_code_field_and_whether_it_ran(peer):
    error = encode_fields(
        [(wire.T_CODE, "conflict"), (wire.T_MESSAGE, "why"), (wire.T_RAN, 1), (wire.T_FIELD, "op_id"), (wire.T_ERRNO, 17)]
    )
    with pytest.raises(Conflict, match="why") as caught:
        await peer(sending(encode_frame(wire.ERROR, error))).exec("op", ExecRequest(argv=["true"]))
    assert (caught.value.field, caught.value.ran, caught.value.details) == ("op_id", "ran", {"errno": 17})


async def test_an_unknown_error_code_is_still_an_error(peer):
    with pytest.raises(DSecError):
        await peer(sending(encode_frame(wire.ERROR, encode_fields([(wire.T_CODE, "new-kind")])))).start("op", ExecRequest(argv=["true"]))


async def test_a_gap_in_the_kept_output_is_counted(peer):
    exited = encode_frame(wire.EXITED, encode_fields([(wire.T_EXIT_CODE, 0), (wire.T_STDOUT_TOTAL, 1000)]))
    channel = peer(sending(encode_data(1, 0, b"head"), encode_data(1, 996, b"tail"), exited))
    result = await channel.exec("op", ExecRequest(argv=["true"]))
    assert (result.stdout, result.stdout_bytes, result.stdout_dropped) == (b"headtail", 1000, 992)


def descriptors_of_the_pipe(fd):
    return sum(os.path.sameopenfile(fd, int(other)) for other in os.listdir("/proc/self/fd") if is_open(int(other)))


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


async def test_a_descriptor_that_was_not_asked_for_is_not_kept(peer):
    read, write = os.pipe()

    def give(connection, frames):
        socket.send_fds(connection, [encode_frame(wire.OK) + encode_frame(wire.OK)], [read, write])

    channel = peer(give)
    try:
        os.close(await channel.connect(80))
        assert descriptors_of_the_pipe(write) == 2
    finally:
        os.close(read)
        os.close(write)


async def test_a_full_backlog_is_waited_for(tmp_path):
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            channel = ContainerChannel(path)
            call = asyncio.ensure_future(channel.exec("op", ExecRequest(argv=["true"])))
            await asyncio.sleep(0.02)
            assert not call.done()
            listener.accept()[0].close()
            connection = await asyncio.to_thread(lambda: listener.accept()[0])
            with connection:
                connection.sendall(encode_data(1, 0, b"12345") + EXITED)
                assert (await call).stdout == b"12345"
            await channel.aclose()


async def test_letting_go_fails_those_who_wait(peer):
    channel = peer(silent)
    call = asyncio.ensure_future(channel.exec("op", ExecRequest(argv=["true"])))
    await asyncio.sleep(0.02)
    await channel.aclose()
    with pytest.raises(SandboxFailed, match="let go"):
        await call
    with pytest.raises(SandboxFailed):
        await channel.exec("op2", ExecRequest(argv=["true"]))
