"""Limits hold, are seen inside, and are named when they are hit."""

from __future__ import annotations

import asyncio

from dsec.testing.trial import Trial, check, equal, holds
from libdsec.errors import DSecError

__all__: list[str] = []


@check()
async def processors_are_shown_as_limited(trial: Trial) -> None:
    async with trial.sandbox(cpu_cores_limit=1.0) as sandbox:
        result = await sandbox.run_shell("nproc; grep -c ^processor /proc/cpuinfo")
        equal(result.stdout.split(), [b"1", b"1"], "nproc and /proc/cpuinfo")


@check("memory_limit")
async def memory_is_shown_as_limited(trial: Trial) -> None:
    async with trial.sandbox(memory_limit_mb=256) as sandbox:
        result = await sandbox.run_shell("cat /proc/meminfo")
        total = next(int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith(b"MemTotal:"))
        equal(total // 1024, 256, "MemTotal in MiB")


@check("memory_limit")
async def out_of_memory_is_said(trial: Trial) -> None:
    async with trial.sandbox(memory_limit_mb=64) as sandbox:
        try:
            result = await sandbox.run_shell("dd if=/dev/zero of=/dev/null bs=200M count=1", timeout=30)
        except DSecError as error:
            equal(error.cause, "oom", "cause")
            return
        holds(result.oom, f"the result says oom (exit {result.exit_code}, signal {result.signal})")
        info = await sandbox.info()
        if info.state == "failed":
            equal(info.cause, "oom", "cause")
        else:
            equal((await sandbox.run_shell("echo alive")).stdout, b"alive\n", "the sandbox goes on")


@check("disk_limit")
async def a_full_disk_is_an_error_inside(trial: Trial) -> None:
    async with trial.sandbox(disk_limit_mb=32) as sandbox:
        result = await sandbox.run_shell("dd if=/dev/zero of=/root/big bs=1M count=128; code=$?; sync; exit $code", timeout=60)
        holds(result.exit_code != 0, "the write is refused")
        size = int((await sandbox.run_shell("wc -c </root/big")).stdout)
        holds(size <= 33 << 20, f"{size >> 20} MiB were written")
        equal((await sandbox.run_shell("rm /root/big; echo alive")).stdout, b"alive\n", "the sandbox goes on")


@check()
async def too_many_processes_are_refused(trial: Trial) -> None:
    async with trial.sandbox(pids_limit=48) as sandbox:
        result = await sandbox.run_shell("i=0; while [ $i -lt 200 ]; do sleep 20 & i=$((i+1)); done; echo all", timeout=10)
        holds(b"all" not in result.stdout, "200 processes were made with a limit of 48")
        async with asyncio.timeout(20):
            equal((await sandbox.run_shell("echo alive")).stdout, b"alive\n", "the sandbox goes on")


@check()
async def usage_is_reported(trial: Trial) -> None:
    async with trial.sandbox() as sandbox:
        await sandbox.run_shell("i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done")
        info = await sandbox.info()
        holds(info.memory_bytes, f"memory {info.memory_bytes}")
        holds(info.cpu_seconds, f"CPU {info.cpu_seconds}")
