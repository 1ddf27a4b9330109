"""Probes of what keeps a sandbox in: namespaces, identities, seccomp and the security modules."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec._native import NativeBinaryMissing, native_binary
from dsec.doctor.probing import Absent, Probe
from dsec.kernel import features, mounts

__all__ = ["PROBES", "mapped_user_namespace"]

UID_RANGE = (0x10000000, 65536)


def _root(_folder: Path) -> str:
    if os.geteuid() != 0:
        raise Absent(f"running as uid {os.geteuid()}")
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    if not held >> 21 & 1:
        raise Absent("root without CAP_SYS_ADMIN: this is a container without privileges")
    return "uid 0 with CAP_SYS_ADMIN"


def _native(_folder: Path) -> str:
    try:
        path = native_binary()
    except NativeBinaryMissing as error:
        raise Absent(str(error)) from None
    return f"{path.stat().st_size // 1024} KiB at {path}"


def _namespaces(folder: Path) -> str:
    features.unshare(
        features.CLONE_NEWNS
        | features.CLONE_NEWPID
        | features.CLONE_NEWUTS
        | features.CLONE_NEWIPC
        | features.CLONE_NEWCGROUP
        | features.CLONE_NEWNET
    )
    features.make_mounts_private()
    mounts.attach(mounts.make_mount("tmpfs"), folder)
    os.chdir(folder)
    features.pivot_root_here()
    return "mount, pid, uts, ipc, cgroup and net; pivot_root works"


@contextmanager
def mapped_user_namespace() -> Iterator[int]:
    """A descriptor of a user namespace whose root is the first id of a range that no user of the host has."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go[1])  # or the read below would wait for itself
        try:
            features.unshare(features.CLONE_NEWUSER)
            os.write(ready[1], b"+")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    try:
        if os.read(ready[0], 1) != b"+":
            raise Absent("unshare(CLONE_NEWUSER) is refused")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {UID_RANGE[0]} {UID_RANGE[1]}\n")
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(go[1])
        os.close(go[0])
        os.close(ready[0])
        os.waitpid(pid, 0)
    try:
        yield namespace
    finally:
        os.close(namespace)


def _user_namespaces(_folder: Path) -> str:
    with mapped_user_namespace():
        most = Path("/proc/sys/user/max_user_namespaces").read_text().strip()
    return f"65,536 ids mapped; at most {int(most):,} namespaces"


def _seccomp(_folder: Path) -> str:
    features.seccomp_filter()
    actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text()
    return "filter loads" + ("; user notification too" if "user_notif" in actions else "")


def _landlock(_folder: Path) -> str:
    return f"ABI {features.landlock_abi()}"


def _apparmor(_folder: Path) -> str:
    if (
        Path("/sys/module/apparmor/parameters/enabled").exists()
        and Path("/sys/module/apparmor/parameters/enabled").read_text().strip() == "Y"
    ):
        return "enabled"
    raise Absent("not in this kernel, or not enabled at boot")


def _ebpf(_folder: Path) -> str:
    features.load_cgroup_program()
    modules = Path("/sys/kernel/security/lsm")
    with_lsm = modules.exists() and "bpf" in modules.read_text().split(",")
    return "cgroup/skb program loads" + ("; BPF LSM on" if with_lsm else "; BPF LSM off")


def _core_scheduling(_folder: Path) -> str:
    try:
        features.core_scheduling_cookie()
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise Absent("the processor has no hyperthreads: nothing to keep apart") from None
        raise
    return "cookies can be read"


PROBES = [
    Probe(
        "root",
        _root,
        "everything on the node",
        "no sandboxes on this host; the SDK can use another",
        "run as root, in a container: privileged",
        required=True,
    ),
    Probe(
        "native binary",
        _native,
        "aether, chronus and init: what runs and enters sandboxes",
        "no sandboxes",
        "apt-get install build-essential, then `make -C native` or install dsec again",
        required=True,
    ),
    Probe(
        "namespaces, pivot_root",
        _namespaces,
        "the sandbox's own view of the system",
        "no container sandboxes",
        "a kernel with namespaces; in a container: privileged",
        required=True,
    ),
    Probe(
        "user namespaces",
        _user_namespaces,
        "root inside is nobody outside",
        "no container sandboxes",
        "sysctl user.max_user_namespaces=100000",
        required=True,
    ),
    Probe("seccomp", _seccomp, "allowlist of system calls", "no container sandboxes", "a kernel with CONFIG_SECCOMP_FILTER", required=True),
    Probe("Landlock", _landlock, "a second wall round files, later", "one wall less", "Linux 5.13, `lsm=landlock,...` at boot"),
    Probe(
        "AppArmor", _apparmor, "a mandatory profile that binds root too, later", "one wall less", "`apparmor=1 security=apparmor` at boot"
    ),
    Probe("eBPF", _ebpf, "a network allowlist by address and port, later", "network is none or all", "a kernel with CONFIG_CGROUP_BPF"),
    Probe(
        "core scheduling",
        _core_scheduling,
        "keeping the hyperthreads of one core within one class",
        "a best-effort neighbour on the sibling thread slows a step",
        "a kernel with CONFIG_SCHED_CORE, a processor with SMT",
    ),
]
