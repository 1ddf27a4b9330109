"""Packs on the real kernel: what is in the layer, what is not, what it stands on, and how long the sandbox stood for it."""

from __future__ import annotations

import asyncio
import subprocess
from types import SimpleNamespace

import pytest

from dsec.environments import EnvironmentStore, ScratchStore, build
from libdsec.errors import Conflict, InvalidArgument, NotFound
from libdsec.schema import PackRequest

pytestmark = [pytest.mark.root, pytest.mark.slow]


async def test_residue_is_left_out_and_nothing_of_the_base_shows_in_its_place(node):
    box = await node.create()
    await box.sh(
        "echo own > /tmp/of-the-base; mkdir /tmp/d; echo x > /tmp/d/x; echo x > /t/kept; echo x > /t/a.pyc; mkdir -p /t/build/deep"
    )
    await box.sh("echo ls > /root/.ash_history; mkdir -p /root/.cache/pip /root/.cache/other; echo s > /var/lib/systemd/random-seed")
    info = await box.pack(node.name(), scrub=["*.pyc", "/t/build"])
    restored = await node.create(info.name)
    assert await restored.sh("ls -A /tmp /t /root /root/.cache /var/lib/systemd") == (
        "/root:\n.cache\n\n/root/.cache:\nother\n\n/t:\nkept\n\n/tmp:\n\n/var/lib/systemd:\n"
    )
    assert info.left_out == 7


async def test_without_default_rules_all_is_there(node):
    box = await node.create()
    await box.sh("echo own > /tmp/of-the-base; echo ls > /root/.ash_history")
    info = await box.pack(node.name(), default_scrub=False)
    restored = await node.create(info.name)
    assert await restored.sh("cat /tmp/of-the-base /root/.ash_history") == "own\nls\n"


async def test_what_was_deleted_in_a_scrubbed_folder_stays_deleted(node):
    box = await node.create()
    await box.sh("rm /tmp/of-the-base")
    info = await box.pack(node.name())
    assert await (await node.create(info.name)).sh("ls /tmp") == ""


async def test_residue_in_a_renamed_folder_of_the_base_does_not_come_back(node):
    box = await node.create()
    await box.sh("mv /below /t/moved; echo own > /t/moved/one")
    info = await box.pack(node.name(), scrub=["/t/moved/one"])
    assert await (await node.create(info.name)).sh("ls /t/moved") == "deep\ntwo\n"


async def test_owners_modes_capabilities_and_the_root_folder_are_kept(node):
    box = await node.create()
    await box.sh("cp /bin/busybox /t/su; chown 3:4 /t/su; chmod 4711 /t/su; chmod 2770 /t; chown 0:9 /; chmod 711 /")
    capability = "01000002" + "00200000" + "00" * 12
    set_it = f"setxattr {_hex('/t/su')} {_hex('security.capability')} x{capability}"
    get_it = f"getxattr {_hex('/t/su')} {_hex('security.capability')}"
    await box.file([set_it])
    said = await box.file([get_it])
    info = await box.pack(node.name())
    restored = await node.create(info.name)
    assert await restored.sh("stat -c '%a %u %g' /t/su /t /") == "4711 3 4\n2770 0 0\n711 0 9\n"
    assert await restored.file([get_it]) == said


async def test_a_new_link_to_a_file_of_the_base_is_one_file_in_the_layer(node):
    box = await node.create()
    await box.sh("ln /below/one /t/link; echo more >> /t/link; mv /below/deep/three /t/three; ln /t/three /t/four")
    restored = await node.create((await box.pack(node.name())).name)
    assert await restored.sh("cat /below/one; cat /t/three; cd /t; stat -c %h link /below/one three four") == (
        "below/onemore\nbelow/deep/three2\n2\n2\n2\n"
    )
    assert await restored.sh("stat -c %i /t/link /below/one /t/three /t/four | uniq -c | awk '{print $1}'") == "2\n2\n"


async def test_a_workspace_is_the_difference_alone_and_lies_on_any_base(node):
    box = await node.create()
    await box.sh("mkdir /t/project; echo main > /t/project/main; rm /below/one")
    info = await box.pack(node.name(), kind="workspace")
    assert (info.kind, info.below) == ("workspace", [])
    stacked = await node.stack("tiny", info.name)
    assert await stacked.sh("cat /t/project/main; ls /below") == "main\ndeep\ntwo\n"
    with pytest.raises(InvalidArgument, match="base"):
        await node.create(info.name)


async def test_a_workspace_from_a_restored_sandbox_brings_what_the_snapshot_brought(node):
    box = await node.create()
    await box.sh("echo one > /t/one")
    first = await box.pack(node.name())
    restored = await node.create(first.name)
    await restored.sh("echo two > /t/two")
    info = await restored.pack(node.name(), kind="workspace")
    assert await (await node.stack("tiny", info.name)).sh("cat /t/one /t/two") == "one\ntwo\n"


@pytest.mark.parametrize(("layers", "depth"), [(3, 4), (60, 51)], ids=["merged", "stacked"])
@pytest.mark.timeout(300)
async def test_a_chain_of_fifty(home, open_node, layers, depth):
    async with open_node(home, snapshot_layers=layers, snapshot_small_bytes=0) as node:
        box = await node.create()
        deepest = 0
        for number in range(50):
            await box.sh(
                f"cd /t; mkdir {number}; echo {number} > {number}/file; mv {number - 1} m{number - 1} || true; rm -rf m{number - 3}"
            )
            info = await box.pack(node.name())
            await box.stop()
            box = await node.create(info.name)
            deepest = max(deepest, len(box.spec.layers))
        assert await box.sh("cd /t; ls; cat */file") == "49\nm47\nm48\n49\n47\n48\n"
        assert deepest == depth


async def test_two_packs_at_once_and_one_while_the_guest_writes(node):
    box, other = await node.create(), await node.create()
    await box.background("i=0; while :; do i=$((i+1)); echo $i > /t/new; mv /t/new /t/now; echo $i >> /t/log; done")
    await box.sh("until test -s /t/log; do :; done")
    await other.sh("echo other > /t/file")
    infos = await asyncio.gather(box.pack(node.name()), box.pack(node.name()), other.pack(node.name()))
    for info in infos[:2]:
        restored = await node.create(info.name)
        now, last = (await restored.sh("cat /t/now; tail -n 1 /t/log")).split()
        assert int(now) - int(last) in (0, 1), "not the order in which it was written"
        log = (await restored.sh("cat /t/log")).split()
        assert log == [str(number) for number in range(1, int(last) + 1)]
    assert await (await node.create(infos[2].name)).sh("cat /t/file") == "other\n"


async def test_a_paused_sandbox_is_packed_and_stays_paused(node):
    box = await node.create()
    await box.sh("echo kept > /t/file")
    await node.edge.pause(box.id)
    info = await box.pack(node.name())
    assert info.stopped_ms == 0
    assert (await node.edge.get(box.id)).state == "paused"
    assert await (await node.create(info.name)).sh("cat /t/file") == "kept\n"


async def test_the_sandbox_may_end_while_it_is_packed(node):
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=30 2>/dev/null; md5sum < /t/big > /t/sum")
    begun = await node.edge.pack_diff(box.id, PackRequest(name=node.name()))
    assert begun.state == "packing"
    await box.stop()
    info = await node.edge.pack_info(begun.op_id, wait=60)
    assert info.state == "published", info
    assert await (await node.create(info.name)).sh("md5sum < /t/big | cmp - /t/sum && echo same") == "same\n"


async def test_an_id_packs_once(node):
    box = await node.create()
    request = PackRequest(name=node.name(), op_id="pack-1")
    first, second = await asyncio.gather(*(node.edge.pack_diff(box.id, request, wait=60) for _ in range(2)))
    assert first.digest == second.digest
    assert await node.edge.pack_diff(box.id, request) == await node.edge.pack_info("pack-1")
    with pytest.raises(Conflict, match="another pack"):
        await node.edge.pack_diff(box.id, PackRequest(name="else", op_id="pack-1"))


async def test_a_tag_moves_and_provenance_says_where_it_came_from(node):
    box = await node.create()
    name = node.name()
    await box.sh("echo 1 > /t/file")
    first = await box.pack(name, scrub=["*.o"])
    await box.sh("echo 2 > /t/file")
    second = await box.pack(name)
    assert await (await node.create(name)).sh("cat /t/file") == "2\n"
    assert await (await node.create(f"{name}@{first.digest}")).sh("cat /t/file") == "1\n"
    manifest = node.edge.environments.layers.manifest(first.digest)
    assert manifest.source == f"sandbox:{box.id}"
    assert manifest.provenance["sandbox"] == box.id
    assert manifest.provenance["parent"] == box.spec.layers[-1]
    assert "--scrub=*.o" in manifest.provenance["command"]
    assert second.digest != first.digest


async def test_root_that_was_asked_for_over_another_user_stays(node):
    box = await node.create(init_user="1000", workdir="/t")
    assert await box.sh("id -u; pwd") == "1000\n/t\n"
    ours = await node.create((await box.pack(node.name())).name, init_user="root")
    assert await ours.sh("id -u") == "0\n"
    restored = await node.create((await ours.pack(node.name())).name)
    assert await restored.sh("id -u; pwd") == "0\n/t\n"


async def test_bad_input_is_refused_by_name(node):
    box = await node.create()
    with pytest.raises(NotFound):
        await node.edge.pack_diff("sb-local-nobody", PackRequest(name="x"))
    for field, options in (("name", {"name": "../x"}), ("tag", {"name": "x", "tag": "/"}), ("scrub", {"name": "x", "scrub": ["a/b"]})):
        with pytest.raises(InvalidArgument) as refused:
            await node.edge.pack_diff(box.id, PackRequest(**options))
        assert refused.value.field == field
    with pytest.raises(NotFound):
        await node.edge.pack_info("nothing")
    await box.stop()
    with pytest.raises(Conflict):
        await node.edge.pack_diff(box.id, PackRequest(name="x"))


async def test_contents_that_the_store_has_are_not_stored_again(node):
    box = await node.create()
    await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=8 2>/dev/null")
    first = await box.pack(node.name())
    await box.sh("cp /t/big /t/copy; touch /t/big")
    second = await box.pack(node.name())
    assert first.new_bytes >= 8 << 20
    assert second.new_bytes < 1 << 20
    assert second.data_bytes >= 8 << 20


def _hex(text: str) -> str:
    return "x" + text.encode().hex()


@pytest.fixture
def small_store(state_run, base_root):
    """A store on a disk of 24 MB."""
    store = state_run.state / "small"
    store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", store], check=True)
    try:
        environments = EnvironmentStore(state_run.state, state_run.run, store)
        build(environments, "tiny", source=f"dir:{base_root}", kind="base")
        yield SimpleNamespace(state=state_run.state, run=state_run.run, store=store)
        environments.sweep_mounts([])
        ScratchStore(state_run.state, state_run.run).close(unmount=True)
    finally:
        subprocess.run(["umount", store], check=True)


async def test_a_full_store_fails_the_pack_and_leaves_nothing_of_it(small_store, open_node, until):
    async with open_node(small_store) as node:
        box = await node.create()
        await box.sh("dd if=/dev/urandom of=/t/big bs=1M count=40 2>/dev/null")
        info = await node.edge.pack_diff(box.id, PackRequest(name="full", op_id="full"), wait=60)
        assert (info.state, info.error.code, info.error.cause) == ("failed", "quota_exceeded", "disk")
        assert (await node.edge.pack_info("full")).error == info.error
        await until(node.nothing_packs)
        await box.sh("rm /t/big; echo small > /t/file")
        again = await box.pack("fits")
        assert await (await node.create(again.name)).sh("ls /t") == "file\n"


async def test_a_spoilt_layer_is_not_merged_into_a_good_one(node):
    box = await node.create()
    await box.sh("echo one > /t/one")
    first = await box.pack(node.name())
    restored = await node.create(first.name)
    await restored.sh("echo two > /t/two")
    metadata = node.edge.environments.layers.folder(first.digest) / "metadata.erofs"
    whole = metadata.read_bytes()
    metadata.write_bytes(whole.replace(b"one\n", b"bad\n"))
    info = await node.edge.pack_diff(restored.id, PackRequest(name=node.name()), wait=60)
    assert (info.state, info.error.code, info.error.cause) == ("failed", "sandbox_failed", "store-lost")
    metadata.write_bytes(whole)
    again = await restored.pack(node.name())
    assert await (await node.create(again.name)).sh("cat /t/one /t/two") == "one\ntwo\n"
