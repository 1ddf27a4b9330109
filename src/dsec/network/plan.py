"""Addresses, packet rules and resolver file of NAT networks. Pure.

Bridge-less and routed: a sandbox has one address with a /32, its default route goes through a gateway address that every host end of our
veth pairs has, and the host has one route per sandbox. So two sandboxes share no link, and the packet rules see everything that they send.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Final

from libdsec.errors import Unsupported

__all__ = [
    "POOLS",
    "Resolvers",
    "Route",
    "choose_pool",
    "gateway",
    "link_prefix",
    "parse_resolvers",
    "parse_routes",
    "resolv_conf",
    "ruleset",
    "sandbox_address",
    "table_name",
]

POOLS: Final = [
    *IPv4Network("100.64.0.0/10").subnets(new_prefix=15),
    *IPv4Network("10.192.0.0/10").subnets(new_prefix=15),
    IPv4Network("198.18.0.0/15"),
]
"""Tried in order: the carriers' private range, a rarely used part of 10/8, the benchmark range. Each has an address for every uid range."""

FIRST_HOST: Final = 16
LINK_LOCAL: Final = IPv4Network("169.254.0.0/16")


@dataclass(frozen=True, slots=True)
class Resolvers:
    """The host's name servers as a sandbox reaches them: `remote` by their own address, `local` (on the host's loopback) by the gateway."""

    remote: tuple[IPv4Address, ...]
    local: IPv4Address | None
    search: str


def parse_resolvers(text: str) -> Resolvers:
    """From a resolv.conf. IPv6 servers are left out, as the sandbox has no IPv6."""
    remote: list[IPv4Address] = []
    local: IPv4Address | None = None
    search = ""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                address = ip_address(words[1].partition("%")[0])
            except ValueError:
                continue
            if not isinstance(address, IPv4Address):
                continue
            if address.is_loopback or address.is_unspecified:
                local = local or (IPv4Address("127.0.0.1") if address.is_unspecified else address)
            else:
                remote.append(address)
        elif len(words) >= 2 and words[0] in ("search", "domain"):
            search = " ".join(words[1:])
    return Resolvers(tuple(remote), local, search)


def resolv_conf(resolvers: Resolvers, pool: IPv4Network) -> str:
    """The sandbox's own. Empty but for a comment where the host has no name server."""
    servers = [*([gateway(pool)] if resolvers.local is not None else []), *resolvers.remote]
    lines = [f"search {resolvers.search}"] if resolvers.search else []
    lines += [f"nameserver {address}" for address in servers[:3]]
    return "\n".join(lines or ["# the host has no name server"]) + "\n"


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the host. The default route's network is 0.0.0.0/0."""

    device: str
    network: IPv4Network


def parse_routes(text: str) -> list[Route]:
    """From /proc/net/route, whose numbers are hexadecimal in the host's byte order."""
    routes: list[Route] = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) >= 8:
            destination, mask = (int.from_bytes(bytes.fromhex(words[column]), sys.byteorder) for column in (1, 7))
            routes.append(Route(words[0], IPv4Network((destination, mask.bit_count()))))
    return routes


def choose_pool(taken: Iterable[IPv4Network]) -> IPv4Network:
    """The first pool that meets none of the host's own networks. Unsupported if all do."""
    taken = list(taken)
    for pool in POOLS:
        if not any(pool.overlaps(network) for network in taken if network.prefixlen > 0):
            return pool
    raise Unsupported("network nat: every private range that would serve is in use on this host", field="network")


def gateway(pool: IPv4Network) -> IPv4Address:
    return pool.network_address + 1


def sandbox_address(pool: IPv4Network, index: int) -> IPv4Address:
    """The address that goes with a uid range; both are one sandbox's alone on the node."""
    address = pool.network_address + FIRST_HOST + index
    if index < 0 or address >= pool.broadcast_address:
        raise ValueError(f"index {index} is beyond {pool}")
    return address


def link_prefix(instance: str) -> str:
    """How the names of an instance's veths begin; with a range index in hexadecimal they stay below the kernel's 15 characters."""
    return f"d{instance.rpartition('-')[2][:8]}x"


def table_name(instance: str) -> str:
    return instance.replace("-", "_")


def ruleset(instance: str, pool: IPv4Network, resolvers: Resolvers) -> str:
    """The instance's nftables table, whole: loading it again replaces it at once.

    From a sandbox: name servers and the outside; not the host, other sandboxes or link-local (cloud metadata). To a sandbox: answers.
    """
    ours, table, gate = f'"{link_prefix(instance)}*"', table_name(instance), gateway(pool)
    dns_packet = "meta l4proto { tcp, udp } th dport 53"
    local_dns = [f"iifname {ours} ip daddr {gate} {dns_packet} dnat to {resolvers.local}:53"] if resolvers.local else []
    dns = _set(resolvers.remote)
    remote_dns = [f"iifname {ours} ip daddr {dns} {dns_packet} accept"] if resolvers.remote else []
    chains = {
        "before": ("nat hook prerouting priority dstnat", local_dns),
        "incoming": (
            "filter hook input priority filter - 10",
            [
                f"iifname {ours} ct status dnat accept",
                *remote_dns,
                f"iifname {ours} drop",
            ],
        ),
        "forwarded": (
            "filter hook forward priority filter - 10",
            [
                f"iifname {ours} ip saddr != {pool} drop",
                *remote_dns,
                f"iifname {ours} ip daddr {_set((pool, LINK_LOCAL))} drop",
                f"oifname {ours} ct state established,related accept",
                f"oifname {ours} drop",
            ],
        ),
        "after": ("nat hook postrouting priority srcnat", [f"ip saddr {pool} oifname != {ours} masquerade"]),
    }
    lines = [f"table ip {table}", f"delete table ip {table}", f"table ip {table} {{"]
    for name, (hook, rules) in chains.items():
        lines += [f"  chain {name} {{", f"    type {hook}; policy accept;", *(f"    {rule}" for rule in rules), "  }"]
    return "\n".join([*lines, "}"]) + "\n"


def _set(members: Sequence[object]) -> str:
    return "{ " + ", ".join(str(member) for member in members) + " }"
