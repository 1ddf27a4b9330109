"""The system call filter, run by an interpreter of classic BPF, on tables of both architectures."""

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.isolation.policy import ALLOWED, CONDITIONS, MISSING
from dsec.isolation.seccomp import ALLOW, KILL_PROCESS, compile_filter
from dsec.isolation.syscalls import AARCH64, X86_64
from libdsec.errors import Unsupported

MACHINES = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}
BPF_MAXINSNS = 4096


def run(program, number, arch, *arguments):
    """What the kernel would do: the return value for this call. Counts steps as a bound against loops."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator = position = 0
    for _ in range(len(instructions)):
        code, true, false, k = instructions[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x06:
            return k
        elif code == 0x05:
            position += k
        else:
            taken = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            position += true if taken else false
    raise AssertionError("ran off the end")


def refused(code):
    return 0x00050000 | code


@pytest.fixture(params=MACHINES)
def call(request):
    arch, table = MACHINES[request.param]
    program = compile_filter(request.param)

    def call(name, *arguments):
        return run(program, table[name], arch, *arguments)

    return call


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_gets_what_the_policy_says(machine):
    arch, table = MACHINES[machine]
    program = compile_filter(machine)
    for name, number in table.items():
        if name in CONDITIONS:
            continue
        expected = refused(errno.ENOSYS) if name in MISSING else ALLOW if name in ALLOWED else refused(errno.EPERM)
        assert run(program, number, arch) == expected, name


@pytest.mark.parametrize("machine", MACHINES)
def test_the_program_is_short_and_its_jumps_stay_inside(machine):
    instructions = list(struct.iter_unpack("<HBBI", compile_filter(machine)))
    assert len(instructions) < BPF_MAXINSNS // 8
    for position, (code, true, false, k) in enumerate(instructions):
        assert position + 1 + (k if code == 0x05 else max(true, false) if code & 7 == 5 else 0) < len(instructions) or code == 0x06


@given(st.integers(470, 2**32 - 1))
def test_numbers_that_nobody_knows_are_not_there(number):
    for machine, (arch, _) in MACHINES.items():
        assert run(compile_filter(machine), number, arch) == refused(errno.ENOSYS)


def test_the_x32_table_is_not_there():
    assert run(compile_filter("x86_64"), 0x40000000 | X86_64["read"], MACHINES["x86_64"][0]) == refused(errno.ENOSYS)


@pytest.mark.parametrize("arch", [0x40000003, 0x40000028, 0xC00000B7], ids=["i386", "arm", "aarch64"])
def test_another_architecture_kills(arch):
    assert run(compile_filter("x86_64"), 3, arch) == KILL_PROCESS


NEW_NAMESPACE = {
    "mnt": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}

DOORS = """
    mount umount2 pivot_root setns fsopen fsmount move_mount open_tree mount_setattr bpf perf_event_open userfaultfd keyctl add_key
    request_key kexec_load init_module finit_module delete_module reboot swapon open_by_handle_at io_uring_setup io_uring_enter
    io_uring_register acct settimeofday clock_settime quotactl syslog fanotify_init iopl ioperm modify_ldt kcmp
"""


@pytest.mark.parametrize("flag", NEW_NAMESPACE.values(), ids=NEW_NAMESPACE)
def test_new_namespaces_are_refused(call, flag):
    assert call("clone", flag | 17) == refused(errno.EPERM)
    assert call("unshare", flag) == refused(errno.EPERM)


def test_threads_and_forks_are_allowed(call):
    assert call("clone", 0x003D0F00) == ALLOW
    assert call("clone", 0x01200011) == ALLOW
    assert call("unshare", 0x600) == ALLOW


def test_a_new_time_namespace_is_refused_where_it_can_be_asked_for(call):
    assert call("unshare", 0x80) == refused(errno.EPERM)


def test_no_process_is_made_as_a_child_of_its_makers_parent(call):
    assert call("clone", 0x8000 | 17) == refused(errno.EPERM)


@pytest.mark.parametrize("name", ["io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents"])
def test_the_hosts_stock_of_asynchronous_io_is_not_there(call, name):
    assert call(name) == refused(errno.ENOSYS)


def test_clone3_sends_libc_back_to_clone(call):
    assert call("clone3") == refused(errno.ENOSYS)


@pytest.mark.parametrize("command", [0x5412, 0x541C], ids=["TIOCSTI", "TIOCLINUX"])
def test_typing_into_a_terminal_is_refused_whatever_the_high_bits(call, command):
    assert call("ioctl", 0, command) == refused(errno.EPERM)
    assert call("ioctl", 0, command | 1 << 40) == refused(errno.EPERM)


def test_other_terminal_calls_are_allowed(call):
    assert call("ioctl", 0, 0x5413) == ALLOW


@pytest.mark.parametrize(("family", "protocol"), [(1, 0), (2, 6), (10, 17), (16, 0)], ids=["unix", "inet", "inet6", "route"])
def test_ordinary_sockets_are_allowed(call, family, protocol):
    assert call("socket", family, 1, protocol) == ALLOW


@pytest.mark.parametrize("family", [17, 38, 40, 44, 31, 29], ids=["packet", "alg", "vsock", "xdp", "bluetooth", "can"])
def test_other_socket_families_do_not_exist(call, family):
    assert call("socket", family, 3, 0) == refused(errno.EAFNOSUPPORT)


@pytest.mark.parametrize("protocol", [4, 9, 12, 15], ids=["diag", "audit", "netfilter", "uevent"])
def test_netlink_is_for_routes_only(call, protocol):
    assert call("socket", 16, 3, protocol) == refused(errno.EPROTONOSUPPORT)


def test_an_unusual_personality_is_refused(call):
    assert call("personality", 0xFFFFFFFF) == ALLOW
    assert call("personality", 0x0040000) == ALLOW
    assert call("personality", 0x0400000) == refused(errno.EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_doors_into_the_kernel_are_shut(machine):
    arch, table = MACHINES[machine]
    for name in DOORS.split():
        assert name in X86_64
        if name in table:
            assert run(compile_filter(machine), table[name], arch) == refused(errno.EPERM), name


def test_all_names_of_the_policy_are_names():
    assert ALLOWED | MISSING | set(CONDITIONS) <= set(X86_64) | set(AARCH64)


def test_a_machine_without_a_table_is_unsupported():
    with pytest.raises(Unsupported, match="riscv64"):
        compile_filter("riscv64")
