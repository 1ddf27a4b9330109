"""Calls that only ask what this kernel can do. Each changes the calling process, so make them in a child that ends afterwards."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from typing import Final

from dsec.kernel.syscalls import fail

__all__ = [
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "core_scheduling_cookie",
    "exit_in_cgroup",
    "kvm_api_version",
    "landlock_abi",
    "load_cgroup_program",
    "make_mounts_private",
    "pivot_root_here",
    "seccomp_filter",
    "unshare",
]

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
_CLONE_INTO_CGROUP: Final = 0x200000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_NUMBERS: Final = {
    "x86_64": {"bpf": 321, "seccomp": 317, "pivot_root": 155},
    "aarch64": {"bpf": 280, "seccomp": 277, "pivot_root": 41},
}
_CLONE3, _LANDLOCK_CREATE_RULESET = 435, 444
_PR_SET_NO_NEW_PRIVS, _PR_SCHED_CORE = 38, 62
_BPF_PROG_LOAD, _BPF_PROG_TYPE_CGROUP_SKB = 5, 8
_SECCOMP_SET_MODE_FILTER, _SECCOMP_RET_ALLOW = 1, 0x7FFF0000
_KVM_GET_API_VERSION: Final = 0xAE00

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise fail(what, ctypes.get_errno())
    return result


def _raw(what: str, number: int, *arguments: object) -> int:
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _checked(what, int(_libc.syscall(ctypes.c_long(number), *converted)))


def _number(name: str) -> int:
    try:
        return _NUMBERS[platform.machine()][name]
    except KeyError:
        raise fail(name, errno.ENOSYS) from None


def unshare(flags: int) -> None:
    """unshare(2)."""
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def make_mounts_private() -> None:
    """Take this mount namespace out of propagation: what is mounted here is seen nowhere else."""
    _checked("mount(private)", _libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))


def pivot_root_here() -> None:
    """Make the working directory the root; the old root lies over it, as pivot_root(2) describes for `.`."""
    _raw("pivot_root", _number("pivot_root"), b".", b".")


def landlock_abi() -> int:
    """Version of Landlock's ABI."""
    return _raw("landlock_create_ruleset", _LANDLOCK_CREATE_RULESET, None, 0, 1)


def seccomp_filter() -> None:
    """Install a filter that allows everything."""
    _checked("prctl(no_new_privs)", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    instructions = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, _SECCOMP_RET_ALLOW))
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", 1, ctypes.addressof(instructions)))
    _raw("seccomp", _number("seccomp"), _SECCOMP_SET_MODE_FILTER, 0, program)


def load_cgroup_program() -> None:
    """Load and drop a BPF program of two instructions that lets every packet of a cgroup pass."""
    instructions = ctypes.create_string_buffer(struct.pack("=BBhi", 0xB7, 0, 0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0))
    license_text = ctypes.create_string_buffer(b"Apache-2.0")
    attributes = struct.pack(
        "=IIQQIIQII", _BPF_PROG_TYPE_CGROUP_SKB, 2, ctypes.addressof(instructions), ctypes.addressof(license_text), 0, 0, 0, 0, 0
    )
    os.close(_raw("bpf(PROG_LOAD)", _number("bpf"), _BPF_PROG_LOAD, ctypes.create_string_buffer(attributes.ljust(128, b"\0")), 128))


def core_scheduling_cookie() -> int:
    """This thread's core scheduling cookie. ENODEV: the kernel can, the processor has no hyperthreads."""
    cookie = ctypes.c_ulonglong(0)
    _checked("prctl(PR_SCHED_CORE)", _libc.prctl(_PR_SCHED_CORE, 0, 0, 0, ctypes.byref(cookie)))
    return cookie.value


def exit_in_cgroup(cgroup: int) -> int:
    """clone3(2) with CLONE_INTO_CGROUP into the v2 group open as `cgroup`: a child that exits with 0 at once. Returns its pid."""
    arguments = ctypes.create_string_buffer(struct.pack("=11Q", _CLONE_INTO_CGROUP, 0, 0, 0, 17, 0, 0, 0, 0, 0, cgroup))
    pid = _raw("clone3", _CLONE3, arguments, 88)
    if pid == 0:
        os._exit(0)
    return pid


def kvm_api_version(kvm: int) -> int:
    """KVM_GET_API_VERSION on an open /dev/kvm."""
    return fcntl.ioctl(kvm, _KVM_GET_API_VERSION)
