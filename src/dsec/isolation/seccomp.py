"""The system call filter: dsec.isolation.policy compiled to classic BPF. Pure.

The number is looked up by binary search over ranges of equal treatment, so that a call costs about seven comparisons, and on kernels since
5.11 none where the answer is an unconditional yes (the kernel finds those when the filter is attached). The kernel translates the program
for each command anew, so it is kept short: each answer is there once, and all that give it jump to it.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from dataclasses import dataclass
from typing import Final

from dsec.isolation.policy import ALLOWED, CONDITIONS, MISSING, Check
from dsec.isolation.syscalls import AARCH64, X86_64
from libdsec.errors import Unsupported

__all__ = ["ALLOW", "KILL_PROCESS", "compile_filter", "host_filter"]

ALLOW: Final = 0x7FFF0000
KILL_PROCESS: Final = 0x80000000
_ERRNO: Final = 0x00050000

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
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


@dataclass(frozen=True, slots=True)
class _Jump:
    """A comparison that goes on at one of two labels; None is the next instruction."""

    code: int
    value: int
    true: str | None
    false: str | None


_Line = Instruction | _Jump | str
"""An instruction, a comparison, or the label of what follows."""


def _return_label(value: int) -> str:
    return f"return {value:#x}"


def _check(check: Check, after: str) -> list[_Line]:
    refuse = _return_label(_ERRNO | check.errno)
    lines: list[_Line] = []
    if check.when is not None:
        argument, value = check.when
        lines += [(_LOAD, 0, 0, _ARGS_OFFSET + 8 * argument), _Jump(_JEQ, value, None, after)]
    lines.append((_LOAD, 0, 0, _ARGS_OFFSET + 8 * check.argument))
    if check.operator == "not-in":
        lines += [_Jump(_JEQ, value, after, None) for value in check.values[:-1]]
        lines.append(_Jump(_JEQ, check.values[-1], after, refuse))
    else:
        jump = _JSET if check.operator == "any-bit" else _JEQ
        lines += [_Jump(jump, value, refuse, None) for value in check.values[:-1]]
        lines.append(_Jump(jump, check.values[-1], refuse, after))
    return lines


def _checks(label: str, checks: tuple[Check, ...]) -> list[_Line]:
    lines: list[_Line] = [label]
    for index, check in enumerate(checks, 1):
        after = f"{label} {index}" if index < len(checks) else _return_label(ALLOW)
        lines += _check(check, after)
        if index < len(checks):
            lines.append(after)
    return lines


def _target(treatment: Treatment) -> str:
    return _return_label(treatment) if isinstance(treatment, int) else f"check {treatment}"


def _search(ranges: list[tuple[int, Treatment]]) -> list[_Line]:
    """At least two ranges. Where one half is decided, the other half's comparisons follow at once."""
    middle = len(ranges) // 2
    first, below, above = ranges[middle][0], ranges[:middle], ranges[middle:]
    left = _target(below[0][1]) if len(below) == 1 else None
    right = _target(above[0][1]) if len(above) == 1 else f"from {first}" if left is None else None
    lines: list[_Line] = [_Jump(_JGE, first, right, left)]
    if left is None:
        lines += _search(below)
    if len(above) > 1:
        if left is None:
            lines.append(f"from {first}")
        lines += _search(above)
    return lines


def _assemble(lines: list[_Line]) -> list[Instruction]:
    """Labels become distances. All jumps go forward."""
    places: dict[str, int] = {}
    position = 0
    for line in lines:
        if isinstance(line, str):
            places[line] = position
        else:
            position += 1
    program: list[Instruction] = []
    for line in lines:
        if isinstance(line, _Jump):
            true, false = (0 if label is None else places[label] - len(program) - 1 for label in (line.true, line.false))
            assert max(true, false) <= _MAX_BRANCH, "the table has outgrown the reach of a jump"
            program.append((line.code, true, false, line.value))
        elif not isinstance(line, str):
            program.append(line)
    return program


@functools.cache
def compile_filter(machine: str) -> bytes:
    """The array of struct sock_filter for `machine` (`x86_64`, `aarch64`). Calls of any other architecture kill the process."""
    if machine not in _ARCHITECTURES:
        raise Unsupported(f"no system call table for {machine}; there are {', '.join(sorted(_ARCHITECTURES))}")
    architecture, table = _ARCHITECTURES[machine]
    ranges = _treatments(table)
    checked = {treatment for _, treatment in ranges if not isinstance(treatment, int)}
    answers = {treatment for _, treatment in ranges if isinstance(treatment, int)}
    answers |= {ALLOW, *(_ERRNO | check.errno for checks in checked for check in checks)}
    lines: list[_Line] = [(_LOAD, 0, 0, _ARCH_OFFSET), _Jump(_JEQ, architecture, None, _return_label(KILL_PROCESS))]
    lines += [(_LOAD, 0, 0, _NUMBER_OFFSET), *_search(ranges)]
    for _, treatment in ranges:
        if not isinstance(treatment, int) and treatment in checked:
            checked.remove(treatment)
            lines += _checks(_target(treatment), treatment)
    for answer in sorted({*answers, KILL_PROCESS}):
        lines += [_return_label(answer), (_RETURN, 0, 0, answer)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in _assemble(lines))


def host_filter() -> bytes:
    """The filter for this host's architecture."""
    return compile_filter(platform.machine())
