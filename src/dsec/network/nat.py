"""network="nat": a veth pair to each sandbox and address translation for the instance, through netlink and nftables.

Blocking calls; a sandbox's network is made after its namespaces are ready and before its first command. What is on the host afterwards: one
nftables table and the veths of this instance, both named after it, and IPv4 forwarding on the interface of the default route.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
import threading
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

from dsec.network.plan import (
    Resolvers,
    Route,
    choose_pool,
    gateway,
    link_prefix,
    parse_resolvers,
    parse_routes,
    resolv_conf,
    ruleset,
    sandbox_address,
    table_name,
)
from libdsec.errors import DSecError, Unsupported

__all__ = ["NatNetwork"]

NFT_SECONDS: Final = 20.0
INSIDE_NAME: Final = "eth0"
SCOPE_LINK: Final = 253
CONF: Final = Path("/proc/sys/net/ipv4/conf")


def _nft(text: str, *options: str) -> None:
    """Load a ruleset in one transaction. Raises Unsupported with what the kernel or nft said."""
    binary = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if binary is None:
        raise Unsupported("network nat: nftables (nft) is not installed", field="network")
    done = subprocess.run([binary, *options, "-f", "-"], input=text, capture_output=True, text=True, timeout=NFT_SECONDS, check=False)
    if done.returncode != 0:
        raise Unsupported(
            f"network nat: nftables refuses: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else 'no reason given'}"
        )


@contextlib.contextmanager
def _netlink(namespace: str | None = None) -> Iterator[Any]:
    # Imported late: only those who ask for nat pay the 100 ms.
    from pyroute2 import IPRoute

    with IPRoute(netns=namespace) if namespace is not None else IPRoute() as route:
        yield route


def _is_netlink_error(error: BaseException, *codes: int) -> bool:
    return getattr(error, "code", None) in codes


class NatNetwork:
    """The NAT networks of one instance. Thread-safe."""

    def __init__(self, instance: str, *, resolvers: Path = Path("/etc/resolv.conf")) -> None:
        self._instance = instance
        self._prefix = link_prefix(instance)
        self._resolvers_file = resolvers
        self._lock = threading.Lock()
        self._links: dict[str, str] = {}
        self._pool: IPv4Network | None = None
        self._resolvers = Resolvers((), None, "")
        self._ready = False
        self._stale = False

    def probe(self) -> str | None:
        """Find what a former life left, remove its table if nobody needs it, and say why NAT cannot work here; None if it can."""
        self._links = self._scan()
        self._ready = False
        self._stale = bool(self._links)
        if not self._stale:
            self._drop_table()
        try:
            _nft(ruleset(self._instance, self._choose(), self._read_resolvers()), "-c")
        except DSecError as error:
            return error.message.removeprefix("network nat: ")
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        return None

    def _read_resolvers(self) -> Resolvers:
        try:
            self._resolvers = parse_resolvers(self._resolvers_file.read_text())
        except OSError:
            self._resolvers = Resolvers((), None, "")
        return self._resolvers

    def resolv_conf(self) -> str:
        """The sandbox's /etc/resolv.conf."""
        with self._lock:
            return resolv_conf(self._read_resolvers(), self._choose())

    def _choose(self) -> IPv4Network:
        """A range apart from the host's networks. Links of any instance do not count: uid ranges keep their addresses apart."""
        if self._pool is None:
            others = [route.network for route in self._routes() if not (route.device[:1] == "d" and route.device[9:10] == "x")]
            self._pool = choose_pool(others)
        return self._pool

    def _routes(self) -> list[Route]:
        return parse_routes(Path("/proc/net/route").read_text())

    def _prepare(self) -> IPv4Network:
        pool = self._choose()
        if not self._ready:
            _nft(ruleset(self._instance, pool, self._read_resolvers()))
            for route in self._routes():
                if route.network.prefixlen == 0:
                    _set(route.device, "forwarding", "1")
            self._ready = True
        return pool

    def attach(self, sandbox_id: str, index: int, pid: int) -> None:
        """Give the network namespace of `pid` an address and a way out. On failure nothing stays."""
        with self._lock:
            pool = self._prepare()
        name = f"{self._prefix}{index:x}"
        try:
            with _netlink() as route:
                with contextlib.suppress(IndexError):
                    # A former owner of the range: its namespace is gone, but the kernel clears such links in its own time.
                    route.link("del", index=route.link_lookup(ifname=name)[0])
                route.link("add", ifname=name, kind="veth", peer={"ifname": INSIDE_NAME, "net_ns_pid": pid})
                self._links[sandbox_id] = name
                link = route.link_lookup(ifname=name)[0]
                route.link("set", index=link, ifalias=sandbox_id)
                _set(name, "forwarding", "1")
                _set(name, "rp_filter", "1")
                if self._resolvers.local is not None:
                    _set(name, "route_localnet", "1")
                with contextlib.suppress(FileNotFoundError):
                    Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
                route.addr("add", index=link, address=str(gateway(pool)), prefixlen=32)
                route.link("set", index=link, state="up")
                route.route("add", dst=f"{sandbox_address(pool, index)}/32", oif=link, scope=SCOPE_LINK)
            with _netlink(f"/proc/{pid}/ns/net") as route:
                link = route.link_lookup(ifname=INSIDE_NAME)[0]
                route.addr("add", index=link, address=str(sandbox_address(pool, index)), prefixlen=32)
                route.link("set", index=link, state="up")
                route.route("add", dst=f"{gateway(pool)}/32", oif=link, scope=SCOPE_LINK)
                route.route("add", dst="default", gateway=str(gateway(pool)), oif=link)
        except BaseException as error:
            self.detach(sandbox_id)
            if _is_netlink_error(error, errno.EOPNOTSUPP):
                raise Unsupported("network nat: this kernel has no veth", field="network") from error
            raise

    def detach(self, sandbox_id: str) -> None:
        """Remove its link, from both ends. Harmless if it has none."""
        name = self._links.get(sandbox_id)
        if name is None:
            return
        with _netlink() as route:
            found = route.link_lookup(ifname=name)
            if found:
                try:
                    route.link("del", index=found[0])
                except Exception as error:
                    if not _is_netlink_error(error, errno.ENODEV):
                        raise
        self._links.pop(sandbox_id, None)

    def owned(self) -> set[str]:
        """Sandboxes of which there is a link."""
        return set(self._links) | (set(self._scan()) if self._links else set())

    def _scan(self) -> dict[str, str]:
        # Not /sys/class/net, which shows the namespace that its sysfs was mounted in.
        if self._prefix not in Path("/proc/net/dev").read_text():
            return {}
        with _netlink() as route:
            return {
                link.get("ifalias") or link.get("ifname"): link.get("ifname")
                for link in route.get_links()
                if link.get("ifname", "").startswith(self._prefix)
            }

    def retire(self) -> None:
        """Remove the table if no sandbox needs it any more."""
        if (self._ready or self._stale) and not self._scan():
            self._drop_table()
            self._ready = self._stale = False

    def _drop_table(self) -> None:
        """Harmless if there is none."""
        with contextlib.suppress(DSecError, OSError, subprocess.SubprocessError):
            _nft(f"table ip {table_name(self._instance)}\ndelete table ip {table_name(self._instance)}\n")


def _set(device: str, name: str, value: str) -> None:
    path = CONF / device / name
    if path.read_text().strip() != value:
        path.write_text(value)
