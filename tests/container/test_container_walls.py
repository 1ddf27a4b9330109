"""What a guest must not be able to do or see, and what it must."""

import os
import re
from pathlib import Path

import pytest

from dsec.isolation.walls import capability_mask
from dsec.resources.uid_ranges import RANGE_IDS, range_base
from libdsec.schema import ExecRequest

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    "text",
    [
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw /sys",
        "mount --bind /tmp /root",
        "umount /proc/kcore",
        "unshare -m true",
        "unshare -U true",
        "unshare -n true",
        "nsenter -t 1 -m true",
        "mknod /tmp/sda b 8 0",
        "mknod /tmp/mem c 1 1",
        "chown 70000 /tmp",
        "hostname other",
        "date -s 2030-01-01; test $(date +%Y) -ge 2030",
        "dmesg",
        "swapoff -a && swapon /dev/zero",
        "reboot -f",
        "echo b > /proc/sysrq-trigger",
        "echo 1 > /proc/sys/kernel/panic",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "echo 0 > /sys/devices/system/cpu/online",
        "echo x > /proc/meminfo",
        "ip link add d0 type dummy",
        "chroot / mount -t proc proc /proc",
    ],
)
async def test_root_inside_is_refused(box, text):
    result = await box.sh(f"{text} 2>&1")
    assert result.exit_code not in (0, None), result
    assert (await box.run("true")).exit_code == 0


@pytest.mark.parametrize(
    "path",
    [
        "/proc/kcore",
        "/proc/kallsyms",
        "/proc/keys",
        "/proc/kmsg",
        "/proc/kpagecgroup",
        "/proc/kpageflags",
        "/proc/cmdline",
        "/proc/modules",
        "/proc/bus",
        "/proc/irq",
        "/proc/mtrr",
    ],
)
async def test_hidden_files_have_nothing_in_them(box, path):
    result = await box.sh(f"head -c 100 {path}")
    assert result.stdout == b""


async def test_sys_shows_processors_and_page_sizes_and_nothing_else(box):
    assert await box.out("find /sys -maxdepth 1 | sort") == "/sys\n/sys/devices\n/sys/fs\n/sys/kernel\n"
    assert await box.out("ls -A /sys/kernel /sys/devices /sys/fs /sys/fs/cgroup") == (
        "/sys/devices:\nsystem\n\n/sys/fs:\ncgroup\n\n/sys/fs/cgroup:\n\n/sys/kernel:\nmm\n"
    )
    assert (await box.sh("find /sys -type f -exec sh -c 'echo 1 > $1' _ {} \\; 2>&1 | grep -v -c Read-only")).stdout == b"0\n"


async def test_a_guest_sees_its_own_processes_only(box):
    shown = await box.out("ps -o pid,args")
    names = [line.split(None, 1)[1] for line in shown.splitlines()[1:]]
    assert all(re.search(r"init|ps|sh", name) for name in names), shown
    assert len(names) <= 4


@pytest.mark.parametrize("name", ["exe", "root", "cwd", "fd/0", "environ", "mem", "maps", "ns/mnt"])
async def test_the_init_gives_nothing_away(box, name):
    result = await box.sh(f"readlink /proc/1/{name} || head -c 1 /proc/1/{name}")
    assert result.stdout == b"", result


async def test_the_init_cannot_be_killed(box):
    await box.sh("kill -9 1; kill -TERM 1; kill -STOP 1")
    assert (await box.run("echo", "alive")).stdout == b"alive\n"


async def test_killing_everything_kills_only_what_is_inside(box):
    result = await box.sh("kill -9 -1; sleep 0.05; echo survived")
    assert result.exit_code in (0, None)
    assert (await box.run("echo", "alive")).stdout == b"alive\n"


async def test_a_command_has_three_descriptors(box):
    listed = await box.out("ls /proc/self/fd; ls -l /proc/$$/fd | grep -v pipe | grep -v null | grep -v total || true")
    assert set(listed.split("\n")[0:4]) <= {"0", "1", "2", "3"}
    assert "sock" not in listed
    assert "anon" not in listed


async def test_capabilities_filter_and_ids_are_as_planned(box):
    status = dict(line.split(":\t", 1) for line in (await box.out("cat /proc/self/status")).splitlines() if ":\t" in line)
    assert int(status["CapBnd"], 16) == capability_mask()
    assert int(status["CapEff"], 16) & ~capability_mask() == 0
    assert status["Seccomp"] == "2"
    guest = dict(line.split(":\t", 1) for line in (await box.out("cat /proc/self/status", user="guest")).splitlines() if ":\t" in line)
    assert int(guest["CapEff"], 16) == int(guest["CapPrm"], 16) == 0


async def test_ids_on_the_host_lie_in_the_sandboxes_own_range(boxes):
    one, two = await boxes(), await boxes()
    assert one.spec.range_index != two.spec.range_index
    await one.channel.start("op", ExecRequest(shell="sleep 100", user="guest", background=True))
    [live] = await one.channel.sessions()
    assert os.stat(f"/proc/{live.pid}").st_uid in (0, range_base(one.spec.range_index) + 1000)
    assert uid_map(live.pid) == ["0", str(range_base(one.spec.range_index)), str(RANGE_IDS)]


def uid_map(pid):
    return Path(f"/proc/{pid}/uid_map").read_text().split()


async def test_sandboxes_do_not_see_each_others_files(boxes):
    one, two = await boxes(), await boxes()
    await one.out("echo secret > /tmp/secret; echo secret > /dev/shm/secret")
    assert await two.out("cat /tmp/secret /dev/shm/secret 2>/dev/null || echo nothing") == "nothing\n"


async def test_the_image_is_not_written_to(boxes, tiny_rootfs):
    box = await boxes()
    await box.out("rm -rf /etc/passwd /bin/ls; echo x > /etc/group")
    assert (await (await boxes()).out("cat /etc/passwd")) == (tiny_rootfs / "etc/passwd").read_text()


async def test_paths_of_the_host_are_not_shown(box):
    shown = await box.out("cat /proc/self/mountinfo /proc/mounts /proc/self/cgroup")
    assert "/tmp/dst-" not in shown
    assert box.spec.sandbox_id not in shown


async def test_there_is_a_loopback_and_nothing_else(box):
    assert await box.out("ls /sys/class/net 2>/dev/null; cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '") == "lo\n"
    assert (await box.sh("ip addr show lo")).stdout.count(b"127.0.0.1/8") == 1
    assert (await box.sh("wget -T 1 http://10.0.0.1/")).exit_code != 0


async def test_low_ports_can_be_bound_by_a_guest(box):
    result = await box.sh("echo hi | nc -l -p 80 & sleep 0.1; nc 127.0.0.1 80", user="guest", timeout=5)
    assert result.stdout == b"hi\n"


async def test_ownership_and_set_user_id_bits_mean_something_inside(box):
    await box.out("touch /tmp/f; chown guest:guest /tmp/f; chmod 4755 /tmp/f")
    assert await box.out("stat -c '%U %a' /tmp/f") == "guest 4755\n"
    assert "nosuid" not in (await box.out("grep ' / ' /proc/mounts")).split()[3]


async def test_programs_show_the_limits(boxes):
    box = await boxes(memory_limit_mb=96, cpu_cores_limit=1)
    assert await box.out("nproc; grep -c ^processor /proc/cpuinfo; cat /sys/devices/system/cpu/online") == "1\n1\n0\n"
    meminfo = await box.out("cat /proc/meminfo")
    assert int(re.search(r"MemTotal:\s+(\d+) kB", meminfo)[1]) == 96 * 1024
    assert int(re.search(r"MemAvailable:\s+(\d+) kB", meminfo)[1]) <= 96 * 1024


@pytest.mark.slow
async def test_a_fork_bomb_stays_inside_its_limit(boxes):
    box = await boxes(pids_limit=40)
    result = await box.sh("b() { b | b & }; b; sleep 0.5", timeout=2, kill_grace=0.1)
    assert result.stdout_bytes >= 0
    assert box.backend._cgroups.pids(box.spec.sandbox_id) <= 40
    await box.backend.destroy(box.spec)
    assert (await (await boxes()).run("echo", "fine")).stdout == b"fine\n"


async def test_devices_are_the_usual_ones(box):
    assert await box.out("cd /dev; for d in null zero full random urandom tty; do test -c $d && echo $d; done; ls -d pts shm fd stdin") == (
        "null\nzero\nfull\nrandom\nurandom\ntty\nfd\npts\nshm\nstdin\n"
    )
    assert (await box.sh("echo x > /dev/full")).exit_code != 0
    assert await box.out("head -c 4 /dev/zero | wc -c; echo gone > /dev/null") == "4\n"
