"""The system call filter: dsec.isolation.policy compiled to classic BPF. Pure.

The number is looked up by binary search over ranges of equal treatment, so that a call costs about seven comparisons, and on kernels since
5.11 none where the answer is an unconditional yes (the kernel finds those when the filter is attached).
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from typing import Final

from dsec.isolation.policy import ALLOWED, CONDITIONS, MISSING, Check
from dsec.isolation.syscalls import AARCH64, X86_64
from libdsec.errors import Unsupported

__all__ = ["ALLOW", "KILL_PROCESS", "compile_filter", "host_filter"]

ALLOW: Final = 0x7FFF0000
KILL_PROCESS: Final = 0x80000000
_ERRNO: Final = 0x00050000

_LOAD, _JUMP, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGS_OFFSET = 0, 4, 16
_MAX_BRANCH: Final = 255

_ARCHITECTURES: Final[dict[str, tuple[int, dict[str, int]]]] = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}

Instruction = tuple[int, int, int, int]
Treatment = int | tuple[Check, ...]
"""What becomes of a call: a return value of the filter, or checks before ALLOW."""


def _treatments(table: dict[str, int]) -> list[tuple[int, Treatment]]:
    """(first number, treatment) of each range, ascending, from 0 on. Numbers without a name are newer than we know, or x32: ENOSYS."""
    by_number: dict[int, Treatment] = {}
    for name, number in table.items():
        if name in MISSING:
            by_number[number] = _ERRNO | errno.ENOSYS
        elif name in CONDITIONS:
            by_number[number] = CONDITIONS[name]
        else:
            by_number[number] = ALLOW if name in ALLOWED else _ERRNO | errno.EPERM
    ranges: list[tuple[int, Treatment]] = []
    for number in range(max(by_number) + 2):
        treatment = by_number.get(number, _ERRNO | errno.ENOSYS)
        if not ranges or ranges[-1][1] != treatment:
            ranges.append((number, treatment))
    return ranges


def _check(check: Check) -> list[Instruction]:
    refuse: Instruction = (_RETURN, 0, 0, _ERRNO | check.errno)
    load: Instruction = (_LOAD, 0, 0, _ARGS_OFFSET + 8 * check.argument)
    body = [load]
    if check.operator == "not-in":
        count = len(check.values)
        body += [(_JEQ, count - index, 0, value) for index, value in enumerate(check.values)]
        body.append(refuse)
    else:
        jump = _JSET if check.operator == "any-bit" else _JEQ
        for value in check.values:
            body += [(jump, 0, 1, value), refuse]
    if check.when is None:
        return body
    argument, value = check.when
    return [(_LOAD, 0, 0, _ARGS_OFFSET + 8 * argument), (_JEQ, 0, len(body), value), *body]


def _leaf(treatment: Treatment) -> list[Instruction]:
    if isinstance(treatment, int):
        return [(_RETURN, 0, 0, treatment)]
    return [instruction for check in treatment for instruction in _check(check)] + [(_RETURN, 0, 0, ALLOW)]


def _search(ranges: list[tuple[int, Treatment]]) -> list[Instruction]:
    if len(ranges) == 1:
        return _leaf(ranges[0][1])
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    first = ranges[middle][0]
    if len(below) <= _MAX_BRANCH:
        return [(_JGE, len(below), 0, first), *below, *above]
    return [(_JGE, 0, 1, first), (_JUMP, 0, 0, len(below)), *below, *above]


@functools.cache
def compile_filter(machine: str) -> bytes:
    """The array of struct sock_filter for `machine` (`x86_64`, `aarch64`). Calls of any other architecture kill the process."""
    if machine not in _ARCHITECTURES:
        raise Unsupported(f"no system call table for {machine}; there are {', '.join(sorted(_ARCHITECTURES))}")
    architecture, table = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_OFFSET),
        (_JEQ, 1, 0, architecture),
        (_RETURN, 0, 0, KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        *_search(_treatments(table)),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def host_filter() -> bytes:
    """The filter for this host's architecture."""
    return compile_filter(platform.machine())
