"""Probes of how a sandbox is connected."""

from __future__ import annotations

from pathlib import Path

from dsec.doctor.commands import run
from dsec.doctor.probing import Absent, Probe
from dsec.kernel import features

__all__ = ["PROBES"]

RULES = "table ip dsec_doctor { chain out { type nat hook postrouting priority 100; policy accept; ip saddr 10.0.0.0/8 masquerade; }; }\n"


def _nat(_folder: Path) -> str:
    features.unshare(features.CLONE_NEWNET)
    try:
        run(["nft", "-f", "-"], stdin=RULES)
    except Absent as no_nft:
        try:
            run(["iptables", "-t", "nat", "-A", "POSTROUTING", "-s", "10.0.0.0/8", "-j", "MASQUERADE"])
        except Absent as no_iptables:
            raise Absent(f"{no_nft}; {no_iptables}") from None
        return "iptables MASQUERADE"
    return "nftables masquerade"


def _veth(_folder: Path) -> str:
    features.unshare(features.CLONE_NEWNET)
    run(["ip", "link", "add", "dsecdoc0", "type", "veth", "peer", "name", "dsecdoc1"])
    return "pairs can be made"


PROBES = [
    Probe("veth", _veth, '`network="nat"`', "loopback only", "a kernel with CONFIG_VETH; apt-get install iproute2"),
    Probe("NAT", _nat, '`network="nat"`', "loopback only", "apt-get install nftables; a kernel with CONFIG_NFT_MASQ"),
]
