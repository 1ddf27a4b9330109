"""Namespaces that the launcher makes ahead: each is one sandbox's, and nobody else holds it."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

KINDS = ("net", "ipc")
AHEAD = 2


def held(pid: int) -> set[str]:
    """Namespaces, other than the host's, that the process holds by descriptor, as `net:[4026532000]`."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = os.readlink(entry)
        except FileNotFoundError:
            continue
        if name.startswith(tuple(f"{kind}:[" for kind in KINDS)):
            found.add(name)
    return found - inside(os.getpid())


def inside(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}


def init_of(box) -> int:
    """The process of the sandbox's group; nothing else runs in it."""
    (pid,) = (box.group() / "cgroup.procs").read_text().split()
    return int(pid)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_each_is_given_to_one_sandbox_and_held_by_nobody_else(boxes, until):
    first = await boxes()
    launcher = boxes.backend._launcher.pid
    await until(lambda: len(held(launcher)) == AHEAD * len(KINDS))
    seen = [inside(init_of(first))]
    for _ in range(3):
        ready = await until(lambda: held(launcher) if len(held(launcher)) == AHEAD * len(KINDS) else None)
        box = await boxes()
        init = init_of(box)
        assert inside(init) <= ready
        assert not inside(init) & held(launcher)
        assert held(parent_of(init)) == set()
        assert await box.out("grep -c : /proc/net/dev; grep -q 127.0.0.1 /proc/net/fib_trie && echo up") == "1\nup\n"
        seen.append(inside(init))
    assert len(set.union(*seen)) == len(seen) * len(KINDS)
    assert not set.union(*seen) & inside(launcher)
    assert inside(launcher) == inside(os.getpid())


async def test_a_burst_makes_its_own(boxes):
    made = [await boxes() for _ in range(AHEAD + 3)]
    own = [inside(init_of(box)) for box in made]
    assert len(set.union(*own)) == len(made) * len(KINDS)
