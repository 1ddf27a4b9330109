"""What forks of a sandbox begin with, and what they do not see of each other."""

from __future__ import annotations

from dsec.testing.trial import Trial, check, equal, holds, refused
from libdsec.errors import Conflict
from libdsec.shielding import finish

__all__: list[str] = []

SETUP = "mkdir -p /var/dsec-check && cd /var/dsec-check && echo first >file && ln file link && chmod 640 file && ln -s file way"
LOOK = "cd /var/dsec-check && cat file link way && ls -l file | cut -c1-10"


@check("fork")
async def forks_have_the_files_of_their_parent(trial: Trial) -> None:
    async with trial.sandbox() as parent:
        (await parent.run_shell(SETUP)).check()
        expected = (await parent.run_shell(LOOK)).check().stdout
        children = await parent.fork(3)
        try:
            equal([(await child.run_shell(LOOK)).stdout for child in children], [expected] * 3, "files")
            equal(len({child.sandbox_id for child in children} | {parent.sandbox_id}), 4, "number of ids")
            holds(all(child.created.parent == parent.sandbox_id for child in children), "a fork names its parent")
            names = {(await child.run_shell("hostname")).stdout for child in children}
            equal(len(names), 3, "number of host names")
        finally:
            for child in children:
                await finish(child.stop())


@check("fork")
async def forks_are_apart_from_then_on(trial: Trial) -> None:
    async with trial.sandbox() as parent:
        (await parent.run_shell(SETUP)).check()
        first, second = await parent.fork(2)
        try:
            (await first.run_shell("echo second >>/var/dsec-check/link")).check()
            (await parent.run_shell("rm /var/dsec-check/way")).check()
            equal((await first.run_shell("cat /var/dsec-check/file")).stdout, b"first\nsecond\n", "by its other name")
            equal((await second.run_shell("cat /var/dsec-check/way")).stdout, b"first\n", "what its sibling and its parent changed")
        finally:
            await finish(first.stop())
            await finish(second.stop())


@check("fork")
async def forks_have_no_process_of_their_parent(trial: Trial) -> None:
    async with trial.sandbox() as parent:
        await parent.start(["sleep", "4711"], background=True)
        [child] = await parent.fork(1)
        async with child:
            found = await child.run_shell("for each in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$each; echo; done")
            holds(b"\nsleep 4711" not in b"\n" + found.stdout, "a process of the parent runs in its fork")
        await refused(child.fork(1), Conflict)
