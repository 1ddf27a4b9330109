"""The thinnest line: a client, a Unix socket, the server, an edge."""

from __future__ import annotations

import stat

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, NotFound


async def test_a_sandbox_is_made_used_and_stopped(served):
    async with DSecClient(served.url) as client:
        async with await client.run_container(DSecContainerRunArgs(container_image="debian")) as sandbox:
            result = await sandbox.run_shell("cat; exit 3", stdin=b"\x00\xff\n")
            assert (result.exit_code, result.stdout) == (3, b"\x00\xff\n")
            assert [info.sandbox_id for info in await client.list(state="running")] == [sandbox.sandbox_id]
        assert (await sandbox.info()).state == "stopped"


async def test_an_error_arrives_typed_with_its_field(served):
    async with DSecClient(served.url) as client:
        with pytest.raises(NotFound) as caught:
            await client.run_container(DSecContainerRunArgs(container_image="nowhere"))
    assert caught.value.field == "container_image"
    assert caught.value.ran == "not-run"


async def test_the_socket_is_for_its_owner_alone(served):
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
