"""Which mechanisms this host has, found by trying each of them."""

from __future__ import annotations

from dsec.doctor import machines, network, resources, storage, walls
from dsec.doctor.probing import Finding, Probe, run_probe

__all__ = ["Finding", "Probe", "all_probes", "examine"]


def all_probes() -> list[Probe]:
    """In the order in which a report shows them."""
    return [*walls.PROBES, *storage.PROBES, *resources.PROBES, *network.PROBES, *machines.PROBES]


def examine() -> list[Finding]:
    """Try everything, one after the other; leaves nothing behind. Takes a second or two, and blocks."""
    return [run_probe(probe) for probe in all_probes()]
