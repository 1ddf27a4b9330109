"""What a create asks for and its image or its host does not have, on the real kernel: refused by its field, and nothing is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libdsec.errors import InvalidArgument
from libdsec.schema import ContainerRunArgs, CreateRequest, ExecRequest, ForkRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]


def asking(**args) -> CreateRequest:
    return CreateRequest(args=ContainerRunArgs(**{"container_image": "tiny", "memory_limit_mb": 64, "disk_limit_mb": 16, **args}))


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"workdir": "/nope"}, "workdir"),
        ({"workdir": "/etc/passwd"}, "workdir"),
        ({"workdir": "/etc/passwd/below"}, "workdir"),
        ({"init_user": "nobody-here"}, "init_user"),
        ({"init_user": "guest:no-such-group"}, "init_user"),
        ({"init_user": "99999999"}, "init_user"),
    ],
)
async def test_what_the_image_lacks_is_refused_by_its_field_and_leaves_nothing(real_edge, args, field):
    with pytest.raises(InvalidArgument) as raised:
        await real_edge.create(asking(**args))
    assert (raised.value.field, raised.value.ran) == (field, "not-run")
    assert await real_edge._core.backends["container"].owned() == set()
    assert real_edge.unremoved == 0


async def test_more_than_the_hosts_disk_is_refused_by_its_field_but_for_the_default(real_edge, monkeypatch):
    with pytest.raises(InvalidArgument, match="this host has") as raised:
        await real_edge.create(asking(disk_limit_mb=100_000_000))
    assert (raised.value.field, raised.value.ran) == ("disk_limit_mb", "not-run")
    scratch = real_edge._core.backends["container"]._scratch
    monkeypatch.setattr(scratch, "_capabilities", replace(scratch.capabilities, size_bytes=200 << 20))
    assert (await real_edge.create(asking(disk_limit_mb=ContainerRunArgs().disk_limit_mb))).sandboxes


async def test_what_the_image_has_is_taken(real_edge):
    made = (await real_edge.create(asking(workdir="/tmp", init_user="guest"))).sandboxes[0].sandbox_id
    assert (await real_edge.exec(made, ExecRequest(shell="pwd; id -un"))).stdout == b"/tmp\nguest\n"


async def test_a_fork_is_not_refused_for_a_folder_that_its_parent_has_removed(real_edge):
    made = (await real_edge.create(asking(workdir="/home/guest"))).sandboxes[0].sandbox_id
    await real_edge.exec(made, ExecRequest(shell="rm -r /home/guest", cwd="/"))
    child = (await real_edge.fork(made, ForkRequest())).sandboxes[0].sandbox_id
    assert (await real_edge.exec(child, ExecRequest(shell="pwd"))).stdout == b"/\n"
