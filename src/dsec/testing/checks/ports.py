"""Ports of services in the sandbox."""

from __future__ import annotations

from dsec.testing.trial import CheckSkipped, Trial, check, equal, eventually, refused
from libdsec.errors import Conflict, DSecError, NotFound
from libdsec.process import Process

__all__: list[str] = []

PORT = 7077
PERL = (
    "use IO::Socket::INET; my $s = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => PORT, Listen => 5, ReuseAddr => 1) or die; "
    "while (my $c = $s->accept) { while (sysread($c, my $b, 65536)) { syswrite($c, $b) } close $c }"
)
PYTHON = (
    "import socket\ns = socket.create_server(('127.0.0.1', PORT))\nwhile True:\n c, _ = s.accept()\n"
    " while b := c.recv(65536): c.sendall(b)\n c.close()"
)


async def _echo_server(trial: Trial) -> Process:
    """A service on PORT that sends back what it gets, with whatever the image has."""
    if await trial.has("python3"):
        return await trial.shared.start(["python3", "-c", PYTHON.replace("PORT", str(PORT))], background=True)
    if await trial.has("perl"):
        return await trial.shared.start(["perl", "-e", PERL.replace("PORT", str(PORT))], background=True)
    if await trial.has("busybox"):
        return await trial.shared.start(["busybox", "nc", "-ll", "-p", str(PORT), "-e", "cat"], background=True)
    raise CheckSkipped("the image has neither python3 nor perl nor busybox to serve with")


@check()
async def a_port_carries_bytes_both_ways(trial: Trial) -> None:
    async with await _echo_server(trial):

        async def echoed() -> bool:
            try:
                async with trial.shared.tcp(PORT) as stream:
                    await stream.write(b"ping\0\xff\n")
                    return await stream.read(7) == b"ping\0\xff\n"
            except DSecError:
                return False

        await eventually("the service answers through its port", echoed)
        data = bytes(range(256)) * 1024
        async with trial.shared.tcp(PORT) as stream:
            await stream.write(data)
            got = b""
            while len(got) < len(data):
                piece = await stream.read(65536)
                if not piece:
                    break
                got += piece
        equal(got, data, "256 KiB")


@check()
async def a_port_without_a_service_is_told(trial: Trial) -> None:
    async def talk() -> object:
        async with trial.shared.tcp(7078) as stream:
            return await stream.read(1)

    await refused(talk(), NotFound, Conflict)
