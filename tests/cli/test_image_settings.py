"""What an image says of itself, in a sandbox that is made from it."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]

SETTINGS = {
    "User": "guest",
    "WorkingDir": "/made/for/it",
    "Env": ["GREETING=hello"],
    "Entrypoint": ["/bin/sh", "-c", 'echo "$GREETING $*"', "entry"],
    "Cmd": ["default"],
    "Volumes": {"/data": {}},
}


@pytest.fixture
def image(node: Any, tmp_path: Path, tiny_rootfs: Path) -> str:
    """The environment `image`, of a layout with the tiny root and these settings."""
    layer = subprocess.run(["tar", "-c", "-C", tiny_rootfs, "."], check=True, capture_output=True).stdout
    blobs = tmp_path / "layout/blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    config = {"config": SETTINGS, "rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}}
    manifest = {"config": blob(json.dumps(config).encode(), "config.v1+json"), "layers": [blob(layer, "layer.v1.tar")]}
    index = {"manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (tmp_path / "layout/index.json").write_text(json.dumps(index))
    built = node.dsec("env", "build", "image", "--from", f"oci:{tmp_path / 'layout'}")
    assert built.returncode == 0, built.stderr
    return "image"


def test_user_folder_and_variables_are_the_images_unless_others_are_given(node: Any, image: str) -> None:
    script = 'id -un; pwd; echo "$GREETING"; stat -c %F /data'
    done = node.dsec("run", image, "sh", "-c", script)
    assert done.stdout.decode().splitlines() == ["guest", "/made/for/it", "hello", "directory"]
    done = node.dsec("run", "--user", "root", "--workdir", "/tmp", "--env", "GREETING=hi", image, "sh", "-c", script)
    assert done.stdout.decode().splitlines() == ["root", "/tmp", "hi", "directory"]


def test_an_images_own_command_runs_when_it_is_asked_for(node: Any, image: str) -> None:
    assert node.dsec("run", "--as-image", image).stdout == b"hello default\n"
    assert node.dsec("run", "--as-image", image, "other", "words").stdout == b"hello other words\n"
    assert node.dsec("run", image, "echo", "plain").stdout == b"plain\n"
    nothing = node.dsec("run", "--as-image", "tiny")
    assert nothing.returncode == 125
    assert b"--as-image" in nothing.stderr
