"""Probes of what virtual machines need. That /dev/kvm opens does not say that a guest boots; a backend that uses it tries that."""

from __future__ import annotations

import os
from pathlib import Path

from dsec.doctor.commands import first_line
from dsec.doctor.probing import Absent, Probe
from dsec.kernel import features

__all__ = ["PROBES"]


def _kvm(_folder: Path) -> str:
    descriptor = os.open("/dev/kvm", os.O_RDWR)
    return f"opens, API version {features.kvm_api_version(descriptor)}"


def _vsock(_folder: Path) -> str:
    os.close(os.open("/dev/vhost-vsock", os.O_RDWR))
    return "opens"


def _qemu(_folder: Path) -> str:
    for program in ("qemu-system-x86_64", "qemu-system-aarch64"):
        try:
            return first_line([program, "--version"])
        except Absent:
            continue
    raise Absent("qemu-system is not installed")


PROBES = [
    Probe("KVM", _kvm, "microVM and full VM at full speed", "they run under emulation", "/dev/kvm in the host, or nested virtualisation"),
    Probe("vhost-vsock", _vsock, "channel into VMs", "virtio-serial is used", "modprobe vhost_vsock"),
    Probe("QEMU", _qemu, "microVM and full VM", "no VM sandboxes", "apt-get install qemu-system-x86"),
]
