"""What real programs do, in a Debian: package installation, users, threads and processes, bash."""

import pytest

from dsec.backends.container.backend import ContainerBackend
from dsec.backends.protocol import SandboxSpec
from dsec.environments import EnvironmentStore, ScratchStore, build
from libdsec.schema import ContainerRunArgs, ExecRequest, SessionRequest, SessionRunRequest

pytestmark = [pytest.mark.root, pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def debian(module_state_run, debian_rootfs):
    environments = EnvironmentStore(module_state_run.state, module_state_run.run)
    build(environments, "debian", source=f"tar:{debian_rootfs}", kind="base")
    yield environments
    environments.sweep_mounts([])
    ScratchStore(module_state_run.state, module_state_run.run).close(unmount=True)


@pytest.fixture
async def channel(debian):
    backend = ContainerBackend(debian, ScratchStore(debian.state, debian.run), debian.run)
    await backend.open(lambda *_: None)
    resolved = debian.resolve(["debian"])
    spec = SandboxSpec(
        sandbox_id="sb-deb",
        generation=1,
        args=ContainerRunArgs(memory_limit_mb=512, cpu_cores_limit=2, pids_limit=256, disk_limit_mb=512),
        layers=[str(layer) for layer in resolved.layers],
        range_index=backend.lease_range("sb-deb"),
        env=resolved.env,
    )
    try:
        yield await backend.create(spec)
    finally:
        await backend.destroy(spec)
        await backend.aclose()


async def out(channel, text, **options):
    out.count += 1
    result = await channel.exec(f"op-{out.count}", ExecRequest(shell=text, timeout=60, **options))
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return result.stdout.decode()


out.count = 0


async def test_shell_text_runs_in_bash_where_there_is_one(channel):
    assert await out(channel, "a=(1 2 3); echo ${#a[@]} ${BASH_VERSION%%.*}") == "3 5\n"


async def test_a_package_is_installed_with_its_owners_and_scripts(channel):
    script = """
    set -e
    mkdir -p /tmp/p/DEBIAN /tmp/p/opt/own; echo x > /tmp/p/opt/own/f; chown -R 33:33 /tmp/p/opt/own; chmod 4755 /tmp/p/opt/own/f
    printf 'Package: own\\nVersion: 1\\nArchitecture: all\\nMaintainer: m\\nDescription: d\\n' > /tmp/p/DEBIAN/control
    printf '#!/bin/sh\\nuseradd -m fresh\\n' > /tmp/p/DEBIAN/postinst; chmod 755 /tmp/p/DEBIAN/postinst
    dpkg-deb --build /tmp/p /tmp/own.deb >/dev/null; dpkg -i /tmp/own.deb >/dev/null
    stat -c '%u %a' /opt/own/f; id -u fresh; dpkg -r own >/dev/null; test ! -e /opt/own
    """
    assert await out(channel, script) == "33 4755\n1000\n"


async def test_changing_user_works_by_su_and_back_by_set_user_id(channel):
    await out(channel, "useradd -m fresh && passwd -d root")
    assert await out(channel, "su fresh -c 'id -un; cd; pwd'") == "fresh\n/home/fresh\n"
    assert await out(channel, "cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id; su fresh -c '/tmp/id -u -n'") == "root\n"


async def test_python_makes_threads_processes_and_sockets(channel):
    script = """
import os, socket, subprocess, threading
server = socket.create_server(("127.0.0.1", 0))
answers = []
def ask():
    with socket.create_connection(server.getsockname()) as s: answers.append(s.recv(9))
threads = [threading.Thread(target=ask) for _ in range(8)]
[t.start() for t in threads]
for _ in threads:
    connection, _ = server.accept(); connection.sendall(b"hello"); connection.close()
[t.join() for t in threads]
pid = os.fork()
if pid == 0: os._exit(7)
print(answers == [b"hello"] * 8, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), subprocess.run(["true"]).returncode)
print(len(os.sched_getaffinity(0)), os.cpu_count())
"""
    result = await channel.exec("op-py", ExecRequest(argv=["python3", "-c", script], timeout=60))
    assert (result.exit_code, result.stderr) == (0, b"")
    assert result.stdout == b"True 7 0\n2 2\n"


async def test_free_and_nproc_show_the_limits(channel):
    assert (await out(channel, "free -m | awk '/Mem/{print $2}'; nproc")).split() == ["512", "2"]


async def test_a_bash_session_keeps_arrays_options_and_directories(channel):
    await channel.open_session("ss", SessionRequest())

    async def run(text):
        out.count += 1
        return (await channel.run_in_session("ss", f"op-{out.count}", SessionRunRequest(shell=text))).stdout.decode()

    await run("cd /usr/share; a=(x y); shopt -s extglob; pushd /tmp > /dev/null")
    assert await run("echo ${a[1]} $PWD; popd > /dev/null; echo $PWD; shopt -q extglob && echo on") == "y /tmp\n/usr/share\non\n"
    assert await run("read x; echo got:$x") == "got:\n"
    assert await run("set -e; false | true; echo survived") == "survived\n"
