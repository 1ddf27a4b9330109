"""Images from a registry, through skopeo: whole, once, for this machine, and with typed errors."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from layouts import MACHINE, Layout, file, folder, tar_of
from registries import serve

from dsec.environments import build
from libdsec.errors import Denied, DSecError, InvalidArgument, NotFound, Unsupported

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")]

BASE = tar_of(folder("etc"), file("etc/base"), file("big", os.urandom(300_000)))
TOP = tar_of(file("etc/top"))


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "layout").image([BASE], name="base").image([BASE, TOP], name="top")


def pull(store, registry, name, image="library/image:top", **arguments):
    return build(store, name, source=f"docker://{registry.host}/{image}", tls_verify=False, **arguments)


def test_an_image_is_pulled_and_says_where_from(store, layout):
    with serve(layout.write()) as registry:
        info = pull(store, registry, "image")
    [path] = store.acquire(store.resolve(["image"]).digests, "sb-1")
    assert sorted(os.listdir(f"{path}/etc")) == ["base", "hostname", "hosts", "resolv.conf", "top"]
    assert info.provenance["pulled"] == f"{registry.host}/library/image:top"
    assert info.provenance["pulled_digest"] == layout.manifests[1]["digest"]
    from_layout = build(store, "layout", source=f"oci:{layout.path}@top")
    assert from_layout.digest == info.digest


def test_what_the_store_has_is_not_fetched_again(store, layout):
    with serve(layout.write()) as registry:
        pull(store, registry, "base", "library/image:base")
        below, above = (layer["digest"] for layer in layout.layers_of(1))
        assert below in registry.fetched
        registry.fetched.clear()
        pull(store, registry, "top")
        assert below not in registry.fetched
        assert above in registry.fetched
    [path] = store.acquire(store.resolve(["top"]).digests, "sb-1")
    assert Path(path, "etc/top").read_bytes() == b"etc/top"
    assert Path(path, "big").stat().st_size == 300_000


def test_of_an_index_the_image_for_this_machine_is_pulled(store, tmp_path):
    layout = Layout(tmp_path / "layout")
    layout.image([TOP], architecture="s390x").image([BASE], architecture=MACHINE)
    layout.index("both")
    with serve(layout.write()) as registry:
        pull(store, registry, "image", "image:both")
    [path] = store.acquire(store.resolve(["image"]).digests, "sb-1")
    assert Path(path, "etc/base").exists()
    only = Layout(tmp_path / "only").image([TOP], architecture="s390x")
    only.index("foreign")
    with serve(only.write()) as registry, pytest.raises(NotFound, match="nothing for linux"):
        pull(store, registry, "image", "image:foreign")


def test_an_image_by_its_digest(store, layout):
    with serve(layout.write()) as registry:
        info = pull(store, registry, "image", f"image@{layout.manifests[0]['digest']}")
        assert info.provenance["pulled_digest"] == layout.manifests[0]["digest"]
        with pytest.raises(NotFound):
            pull(store, registry, "image", "image@sha256:" + "0" * 64)


def test_credentials_are_taken_from_a_file(store, layout, tmp_path):
    with serve(layout.write(), credentials=("me", "secret")) as registry:
        with pytest.raises(Denied):
            pull(store, registry, "image", authfile=_authfile(tmp_path / "wrong", registry.host, "me", "guess"))
        pull(store, registry, "image", authfile=_authfile(tmp_path / "right", registry.host, "me", "secret"))
    with pytest.raises(NotFound) as caught:
        pull(store, registry, "image", authfile=tmp_path / "absent")
    assert caught.value.field == "authfile"


def _authfile(path, host, user, password):
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return path


def test_errors_say_what_is_wrong_and_leave_nothing(store, layout, monkeypatch):
    with serve(layout.write()) as registry:
        with pytest.raises(NotFound):
            pull(store, registry, "image", "image:absent")
        with pytest.raises(DSecError) as plain:  # TLS is asked of a server that has none
            build(store, "image", source=f"docker://{registry.host}/image:top")
        assert plain.value.cause == "registry-unreachable"
        registry.broken = True
        with pytest.raises(DSecError):
            pull(store, registry, "image")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        registry.host = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DSecError) as gone:
            pull(store, registry, "image")
    assert (gone.value.cause, gone.value.ran) == ("registry-unreachable", "not-run")
    for wrong in ("docker:image", "docker://", "docker://host/a b", "docker://host/--x;y", "docker://-x/y"):
        with pytest.raises(InvalidArgument):
            build(store, "image", source=wrong)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unsupported) as missing:
        pull(store, registry, "image")
    assert missing.value.cause == "tool-missing"
    assert store.list() == []
    assert os.listdir(store.staging.root) == []
    assert os.listdir(store.layers.building.root) == []
