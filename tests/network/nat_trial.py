"""Run under `unshare --net`: a small world of namespaces around one NatNetwork. Prints what was reached as JSON.

sandbox a, sandbox b  --veth-->  this namespace ("the host")  --veth-->  world (a server that knows no route back)
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsec.network.nat import NatNetwork

ECHO = """
import socket, sys, threading
def tcp(address, port):
    server = socket.create_server((address, port))
    while True:
        connection, peer = server.accept()
        connection.sendall(peer[0].encode()); connection.close()
def udp(address, port):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); server.bind((address, port))
    while True:
        data, peer = server.recvfrom(512)
        server.sendto(b"answer", peer)
for kind, address, port in (item.split(",") for item in sys.argv[1:]):
    threading.Thread(target={"tcp": tcp, "udp": udp}[kind], args=(address, int(port)), daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""

ASK = """
import socket, sys
kind, address, port = sys.argv[1:]
try:
    if kind == "tcp":
        with socket.create_connection((address, int(port)), 0.4) as s: print(s.recv(100).decode(), end="")
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(0.4); s.sendto(b"?", (address, int(port))); print(s.recvfrom(100)[0].decode(), end="")
except OSError as error:
    print("no", end="")
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class World:
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def process(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def namespace(self) -> int:
        process = self.process("unshare", "--net", "sh", "-c", "ip link set lo up; echo up; exec cat")
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def serve(self, pid: int | None, *services: str) -> None:
        inside = ["nsenter", "-t", str(pid), "-n"] if pid else []
        process = self.process(*inside, sys.executable, "-c", ECHO, *services)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05)


def ask(pid: int, kind: str, address: str, port: int) -> str:
    command = ["nsenter", "-t", str(pid), "-n", sys.executable, "-c", ASK, kind, address, str(port)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def links() -> list[str]:
    shown = json.loads(subprocess.run(["ip", "-j", "link"], check=True, capture_output=True, text=True).stdout)
    return sorted(link["ifname"] for link in shown)


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    found: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        world = World(stack)
        run("ip", "link", "set", "lo", "up")
        outside = world.namespace()
        run("ip", "link", "add", "up0", "type", "veth", "peer", "name", "up1", "netns", str(outside))
        run("ip", "addr", "add", "203.0.113.1/24", "dev", "up0")
        run("ip", "link", "set", "up0", "up")
        for command in ("ip addr add 203.0.113.2/24 dev up1", "ip addr add 169.254.169.254/32 dev up1", "ip link set up1 up"):
            run("nsenter", "-t", str(outside), "-n", *command.split())
        run("ip", "route", "add", "default", "via", "203.0.113.2")
        world.serve(outside, "tcp,0.0.0.0,80", "udp,0.0.0.0,53")
        world.serve(None, "tcp,0.0.0.0,8000", "udp,127.0.0.53,53", "tcp,127.0.0.1,9000")
        resolv = Path(stack.enter_context(tempfile.TemporaryDirectory()), "resolv.conf")
        resolv.write_text("nameserver 127.0.0.53\nnameserver 203.0.113.2\n")
        nat = NatNetwork("dsec-0123abcd", resolvers=resolv)
        found["probe"] = nat.probe()
        found["resolv_conf"] = nat.resolv_conf()
        a, b = world.namespace(), world.namespace()
        nat.attach("sb-a", 0, a)
        nat.attach("sb-b", 70, b)
        gate, address_b = "100.64.0.1", "100.64.0.86"
        world.serve(b, "tcp,0.0.0.0,80")
        found["outside"] = ask(a, "tcp", "203.0.113.2", 80)
        found["outside_from_b"] = ask(b, "tcp", "203.0.113.2", 80)
        found["resolver_local"] = ask(a, "udp", gate, 53)
        found["resolver_remote"] = ask(a, "udp", "203.0.113.2", 53)
        found["other_sandbox"] = ask(a, "tcp", address_b, 80)
        found["host_by_gateway"] = ask(a, "tcp", gate, 8000)
        found["host_by_address"] = ask(a, "tcp", "203.0.113.1", 8000)
        found["host_loopback_by_gateway"] = ask(a, "tcp", gate, 9000)
        found["metadata"] = ask(a, "tcp", "169.254.169.254", 80)
        found["into_sandbox_from_outside"] = ask(outside, "tcp", address_b, 80)
        found["own_loopback"] = ask(b, "tcp", "127.0.0.1", 80)
        found["owned"] = sorted(nat.owned())
        fresh = NatNetwork("dsec-0123abcd", resolvers=resolv)
        fresh.probe()
        found["owned_after_restart"] = sorted(fresh.owned())
        fresh.detach("sb-a")
        nat.detach("sb-a")
        found["cut_off"] = ask(a, "tcp", "203.0.113.2", 80)
        found["other_goes_on"] = ask(b, "tcp", "203.0.113.2", 80)
        nat.attach("sb-c", 0, a)
        found["address_again"] = ask(a, "tcp", "203.0.113.2", 80)
        nat.retire()
        found["table_while_used"] = tables()
        later = NatNetwork("dsec-0123abcd", resolvers=resolv)
        later.probe()
        for sandbox in ("sb-b", "sb-c"):
            later.detach(sandbox)
        later.retire()
        found["links_left"] = links()
        found["tables_left"] = tables()
        killed = NatNetwork("dsec-0123abcd", resolvers=resolv)
        killed.probe()
        killed.attach("sb-d", 0, a)
        killed.detach("sb-d")
        found["tables_after_a_kill"] = tables()
        NatNetwork("dsec-0123abcd", resolvers=resolv).probe()
        found["tables_after_the_next_start"] = tables()
    print(json.dumps(found))


main()
