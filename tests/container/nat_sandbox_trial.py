"""Run under `unshare --net` with (root folder, state, run): a NAT sandbox from birth to end. Prints what it saw as JSON."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from dsec.backends.container.backend import ContainerBackend
from dsec.backends.protocol import SandboxSpec
from dsec.environments import EnvironmentStore, ScratchStore, build
from libdsec.schema import ContainerRunArgs, ExecRequest


def links() -> list[str]:
    shown = subprocess.run(["ip", "-j", "link"], check=True, capture_output=True, text=True).stdout
    return sorted(link["ifname"] for link in json.loads(shown))


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True).stdout


async def trial(rootfs: str, state: Path, run: Path) -> dict[str, object]:
    environments, scratch = EnvironmentStore(state, run), ScratchStore(state, run)
    build(environments, "tiny", source=f"dir:{rootfs}", kind="base")
    found: dict[str, object] = {}
    backend = ContainerBackend(environments, scratch, run)
    await backend.open(lambda *_: None)
    try:
        spec = SandboxSpec(
            sandbox_id="sb-nat",
            generation=1,
            args=ContainerRunArgs(network="nat"),
            layers=[str(layer) for layer in environments.resolve(["tiny"]).layers],
            range_index=backend.lease_range("sb-nat"),
        )
        before = links()
        try:
            channel = await backend.create(spec)
            result = await channel.exec("op", ExecRequest(shell="ip -o addr; ip route; cat /etc/resolv.conf"))
            found["inside"] = result.stdout.decode()
            found["links"] = [link for link in links() if link not in before]
            found["owned"] = sorted(await backend.owned())
        finally:
            await backend.destroy(spec)
        found["left"] = [link for link in links() if link not in before]
    finally:
        await backend.aclose()
        environments.sweep_mounts([])
        ScratchStore(state, run).close(unmount=True)
    found["tables"] = tables()
    return found


for command in (
    "ip link set lo up",
    "ip link add up0 type veth peer name up1",
    "ip addr add 203.0.113.1/24 dev up0",
    "ip link set up0 up",
    "ip link set up1 up",
):
    subprocess.run(command.split(), check=True)
subprocess.run(["ip", "route", "add", "default", "via", "203.0.113.2"], check=True)
print(json.dumps(asyncio.run(trial(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))))
