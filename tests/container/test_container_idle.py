"""What an aether that only waits keeps of a host's memory: thousands of them do."""

import os
from pathlib import Path

import pytest
from container_processes import init_of, status

pytestmark = pytest.mark.root
CPUSET = Path("/sys/fs/cgroup/cpuset")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def aether_of(box) -> int:
    return parent_of(init_of(box))


def own_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def titles(*pids: int) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in pids]


def places(pid: int) -> dict[int, str]:
    """Where each mapping begins, and its name; without what the kernel shows everybody at its own end."""
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {int(line[0].split("-")[0], 16): line[-1] for line in lines if line[-1] != "[vsyscall]"}


async def test_it_has_one_place_in_the_address_space_and_few_tables(boxes):
    aether = aether_of(await boxes())
    assert not {"[vdso]", "[vvar]"} & set(places(aether).values())
    assert max(places(aether)) < 1 << 40
    assert status(aether, "VmPTE") <= 24


async def test_what_a_birth_and_commands_dirtied_goes_back(boxes, until):
    box = await boxes()
    aether = aether_of(box)
    await until(lambda: own_kb(aether) <= 48, seconds=15)
    for _ in range(3):
        assert await box.out("echo $((1 + 1))") == "2\n"
    await until(lambda: own_kb(aether) <= 48, seconds=15)


async def test_it_and_the_launcher_are_told_apart_by_their_names(boxes):
    aether = aether_of(await boxes())
    assert titles(aether, parent_of(aether)) == ["aether", "dsec-native launcher"]


@pytest.mark.skipif(
    not (CPUSET / "cpuset.cpus").exists() or len(os.sched_getaffinity(0)) < 2, reason="needs the v1 cpuset and two processors"
)
async def test_processors_that_a_cpuset_is_given_later_are_used(boxes, until):
    launcher = parent_of(aether_of(await boxes()))
    cpus = sorted(os.sched_getaffinity(0))
    group = CPUSET / f"dsec-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpuset.mems").write_text((CPUSET / "cpuset.mems").read_text())
        (group / "cpuset.cpus").write_text(str(cpus[-1]))
        (group / "tasks").write_text(str(launcher))
        narrow = await boxes()
        assert os.sched_getaffinity(aether_of(narrow)) == {cpus[-1]}
        (group / "cpuset.cpus").write_text(",".join(map(str, cpus)))
        for box in (narrow, await boxes()):
            init = init_of(box)
            await until(lambda pid=init: os.sched_getaffinity(pid) == set(cpus))
            assert os.sched_getaffinity(aether_of(box)) == set(cpus)
    finally:
        for pid in (group / "tasks").read_text().split():
            (CPUSET / "tasks").write_text(pid)
        group.rmdir()
