"""The filter in force: a child process puts it on and tries the doors."""

import json
import platform
import subprocess
import sys

import pytest

from dsec.isolation.seccomp import host_filter
from dsec.isolation.syscalls import AARCH64, X86_64

TABLE = {"x86_64": X86_64, "aarch64": AARCH64}[platform.machine()]

CHILD = """
import ctypes, errno, json, os, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
program = bytes.fromhex(sys.argv[1])
calls = json.loads(sys.argv[2])
buffer = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
fprog = Program(len(program) // 8, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(fprog), 0, 0) == 0, os.strerror(ctypes.get_errno())
out = []
for number, arguments in calls:
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    out.append(ctypes.get_errno() if result < 0 else 0)
thread = threading.Thread(target=lambda: out.append("thread"))
thread.start(); thread.join()
pid = os.fork()
if pid == 0: os._exit(7)
out.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
import subprocess, socket
out.append(subprocess.run(["/bin/echo", "ran"], capture_output=True, text=True).stdout)
socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
print(json.dumps(out))
"""


def inside(*calls):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD,
            host_filter().hex(),
            json.dumps([[TABLE.get(name, name), list(arguments)] for name, *arguments in calls]),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_kernel_takes_it_and_ordinary_programs_run_under_it():
    assert inside() == ["thread", 7, "ran\n"]


@pytest.mark.slow
def test_the_kernel_answers_as_the_policy_says():
    errors = inside(
        ("unshare", 0x20000),
        ("unshare", 0x200),
        ("mount", 0, 0, 0, 0, 0),
        ("clone3", 0, 0),
        ("socket", 38, 5, 0),
        ("socket", 16, 3, 15),
        ("socket", 1, 1, 0),
        ("keyctl", 0, 0),
        ("io_uring_setup", 1, 0),
        ("ioctl", 0, 0x5412, 0),
        ("bpf", 0, 0, 0),
        ("getpid",),
        ("personality", 0xFFFFFFFF),
        ("clone", 0x8000 | 17, 0, 0, 0, 0),
        ("io_setup", 8, 0),
    )
    assert errors[:15] == [1, 0, 1, 38, 97, 93, 0, 1, 1, 1, 1, 0, 0, 1, 38]


def test_a_number_from_the_future_is_not_there():
    assert inside((1000,))[0] == 38
