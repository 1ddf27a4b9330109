"""The walls that stand from the first day. Not a test of escapes: what a sandbox must not be able to do at the front door."""

from __future__ import annotations

from dsec.testing.trial import Trial, check, equal, holds

__all__: list[str] = []


@check()
async def root_inside_cannot_change_the_system(trial: Trial) -> None:
    for command in (
        "mount -t proc none /tmp",
        "mount -o remount,rw /sys",
        "mknod /tmp/disk b 7 0 && head -c 1 /tmp/disk",
        "echo b >/proc/sysrq-trigger",
        "echo 1 >/proc/sys/kernel/panic",
        "echo changed >/proc/sys/kernel/core_pattern",
        "echo 1 >/sys/kernel/mm/ksm/run",
        "dmesg",
        "swapoff -a && false",
        "cat /proc/kcore | head -c 1 | grep -q .",
        "chroot /proc/1/root true && ls /proc/1/root/../../proc/self/../../../etc/shadow-of-the-host",
    ):
        result = await trial.shared.run_shell(command)
        holds(result.exit_code != 0, f"{command!r} went through")


@check()
async def only_its_own_processes_are_seen(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        result = await sandbox.run_shell("ls -d /proc/[0-9]* | wc -l")
        holds(int(result.stdout) < 12, f"{int(result.stdout)} processes are seen in a fresh sandbox")


@check()
async def the_hostname_is_its_own(trial: Trial) -> None:
    async with trial.sandbox(hostname="checked") as sandbox:
        equal((await sandbox.run_shell("hostname")).stdout, b"checked\n", "hostname")


@check()
async def sandboxes_do_not_see_each_other(trial: Trial) -> None:
    async with trial.sandbox() as one, trial.sandbox() as two:
        await one.files.write("/tmp/mine", b"1")
        equal((await two.run_shell("ls /tmp/mine")).exit_code in (1, 2), True, "a file of another sandbox is not there")


@check()
async def without_a_network_there_is_loopback_alone(trial: Trial) -> None:
    async with trial.sandbox(network="none") as sandbox:
        result = await sandbox.run_shell("cat /proc/net/dev")
        names = [line.split(b":")[0].strip() for line in result.stdout.splitlines() if b":" in line]
        equal(names, [b"lo"], "interfaces")


@check()
async def nothing_of_ours_is_inside(trial: Trial) -> None:
    result = await trial.shared.run_shell(
        "ls -a / /run /tmp /var/lib 2>/dev/null; cat /proc/net/unix; cat /proc/1/environ; cat /proc/mounts"
    )
    for word in (b"dsec", b"aether", b"chronus"):
        holds(word not in result.stdout, f"{word.decode()} is seen inside")
