"""Images as podman builds and saves them, against the root that podman itself would run."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from trees import describe

from dsec.environments import build

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(shutil.which("podman") is None, reason="needs podman")]

CONTAINERFILE = r"""
FROM scratch
COPY root /
RUN ["/bin/sh", "-c", "mkdir -p /d/e && echo 1 > /d/e/f && ln /d/e/f /d/hard && ln -s /d /link && truncate -s 3000000 /d/sparse"]
RUN ["/bin/sh", "-c", "rm -r /d/e && mkdir /d/e && echo 2 > /link/e/g && rm /d/hard && chmod 2750 /d && chown 7:8 /link/e/g"]
RUN ["/bin/sh", "-c", "rm -rf /d/e && echo file > /d/e; mkfifo /fifo; touch -d '2001-02-03 04:05:06' /d/e; echo more >> /etc/passwd"]
USER guest
ENV A="b c" D=e
WORKDIR /d
VOLUME /data
ENTRYPOINT ["/bin/sh", "-c"]
CMD ["true"]
"""


@pytest.fixture
def podman(tmp_path):
    """Runs podman on a storage of its own."""
    run_folder = tempfile.mkdtemp(prefix="podman-")  # at most 50 characters are allowed
    storage = [f"--root={tmp_path}/storage", f"--runroot={run_folder}", "--storage-driver=vfs"]

    def run(*words):
        done = subprocess.run(["podman", *storage, *words], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield run
    subprocess.run(["podman", *storage, "rmi", "--all", "--force"], check=False, capture_output=True)
    shutil.rmtree(run_folder)


def test_what_podman_builds_is_what_we_mount(store, podman, tmp_path, tiny_rootfs):
    (tmp_path / "context").mkdir()
    (tmp_path / "context/Containerfile").write_text(CONTAINERFILE)
    subprocess.run(["cp", "-a", f"{tiny_rootfs}/.", tmp_path / "context/root"], check=True)
    options = ["--layers", "--quiet", "--network=host", "--isolation=chroot", "--ulimit=nofile=1024:1024"]
    podman("build", *options, "--tag=x", str(tmp_path / "context"))
    expected = describe(podman("image", "mount", "x"))
    digests = set()
    for form in ("docker-archive", "oci-archive", "oci-dir"):
        podman("save", "--quiet", f"--format={form}", f"--output={tmp_path / form}", "x")
        digests.add(build(store, form, source=f"oci:{tmp_path / form}").digest)
    assert len(digests) == 1
    [path] = store.acquire(store.resolve(["oci-dir"]).digests, "sb-1")
    found = describe(path)
    for made in ("data", "run", "etc/hosts", "etc/hostname", "etc/resolv.conf"):  # what an environment always has
        if made not in expected:
            found.pop(made, None)
    # podman's own root has no time that its layers tell
    assert {name: facts for name, facts in found.items() if name != "."} == {name: facts for name, facts in expected.items() if name != "."}
    resolved = store.resolve(["oci-dir"])
    assert (resolved.user, resolved.workdir, resolved.entrypoint, resolved.command) == ("guest", "/d", ["/bin/sh", "-c"], ["true"])
    assert (resolved.env["A"], resolved.env["D"]) == ("b c", "e")
    assert Path(path, "data").is_dir()
