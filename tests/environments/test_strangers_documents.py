"""Documents of images and of other nodes that are not what they should be: refused by name, and nothing outside is touched."""

from __future__ import annotations

import json
import os
import shutil

import msgspec
import pytest
from layering import noise, publish_files
from layouts import CONFIGURATION, MACHINE, MANIFEST, Layout, file, tar_of
from registries import serve

from dsec.environments import build
from dsec.environments.manifest import Identity
from dsec.environments.publish import import_of
from dsec.environments.sources.workbench import Workbench
from dsec.environments.traces import Trace, TraceRead, load_trace, save_trace
from libdsec.errors import InvalidArgument

pytestmark = pytest.mark.root

LAYER = tar_of(file("etc/base"))
needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")


def with_diff_ids(path, diff_ids):
    """A layout of one layer whose configuration names it otherwise."""
    layout = Layout(path)
    config = {"architecture": MACHINE, "os": "linux", "config": CONFIGURATION, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": layout.blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [layout.blob(LAYER, "layer.v1.tar")],
    }
    descriptor = layout.blob(json.dumps(manifest).encode(), "manifest.v1+json")
    layout.manifests.append({**descriptor, "annotations": {"org.opencontainers.image.ref.name": "top"}})
    return layout


@pytest.mark.slow
@needs_skopeo
def test_a_digest_that_is_a_path_leads_nowhere(store, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text(publish_files(store, "other", {"a": noise(1, 10_000)}).digest)
    os.utime(outside, (1, 1))
    layout = with_diff_ids(tmp_path / "layout", [str(outside)])
    with serve(layout.write()) as registry, pytest.raises(InvalidArgument, match="no digest"):
        build(store, "image", source=f"docker://{registry.host}/image:top", tls_verify=False)
    assert outside.stat().st_mtime == 1
    with pytest.raises(InvalidArgument):
        import_of(store.layers, str(outside))


@pytest.mark.parametrize("digest", ["../../outside", "sha256:" + "Z" * 64, "sha256:" + "é" * 64, 5, None, ["sha256:" + "0" * 64]])
def test_a_digest_that_is_none_is_refused(store, tmp_path, digest):
    layout = with_diff_ids(tmp_path / "layout", [digest])
    with pytest.raises(InvalidArgument) as caught:
        build(store, "image", source=f"oci:{layout.write()}")
    assert caught.value.cause == "archive"


INDEXES = {
    "strings": ["a"],
    "a number": 5,
    "platforms that are none": [{"platform": 5}],
    "no digest": [{"platform": {"os": "linux", "architecture": MACHINE}}],
}


@pytest.mark.slow
@needs_skopeo
@pytest.mark.parametrize("index", INDEXES)
def test_an_index_that_is_none_is_refused(store, tmp_path, index):
    layout = Layout(tmp_path / "layout")
    kind = "application/vnd.oci.image.index.v1+json"
    text = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": INDEXES[index]})
    layout.manifests.append({**layout.blob(text.encode(), "index.v1+json"), "annotations": {"org.opencontainers.image.ref.name": "top"}})
    with serve(layout.write()) as registry, pytest.raises(InvalidArgument) as caught:
        build(store, "image", source=f"docker://{registry.host}/image:top", tls_verify=False)
    assert caught.value.cause == "archive"


@pytest.mark.slow
@needs_skopeo
def test_a_layer_that_goes_after_it_was_found_is_read_again(store, tmp_path, monkeypatch):
    layout = Layout(tmp_path / "layout").image([LAYER], name="top")
    gone = []

    found = Workbench.imported

    def imported(self, diff_id):
        if self.promised and not gone:
            gone.append(diff_id)
            (store.layers.root / "imports" / diff_id.removeprefix("sha256:")).unlink()
        return found(self, diff_id)

    monkeypatch.setattr(Workbench, "imported", imported)
    with serve(layout.write()) as registry:
        first = build(store, "first", source=f"docker://{registry.host}/image:top", tls_verify=False)
        again = build(store, "again", source=f"docker://{registry.host}/image:top", tls_verify=False)
    assert gone
    assert again.digest == first.digest


def test_a_layer_found_by_its_tar_is_no_more_to_be_collected(store):
    manifest = publish_files(store, None, {"a": noise(2, 10_000)}, kind="snapshot", imported="ab" * 32)
    store.layers.condemned.mark("layer", manifest.digest)
    [use] = manifest.identity.packs
    store.layers.condemned.mark("pack", use.digest)
    assert import_of(store.layers, "ab" * 32) == manifest.digest
    assert store.layers.condemned.all() == {}


@pytest.mark.parametrize("text", ["../../etc", "", "sha256:zz"])
def test_what_names_a_layer_wrongly_is_not_found(store, text):
    (store.layers.root / "imports" / ("cd" * 32)).write_text(text)
    assert import_of(store.layers, "cd" * 32) is None


def test_a_manifest_refers_by_digests_alone():
    for field, value in (("below", ["/etc"]), ("packs", [{"digest": "../../etc/shadow", "size": 4096}])):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"kind": "base", "metadata": {"sha256": "0" * 64, "size": 1}, field: value}, Identity)


def test_a_trace_of_another_node_reads_the_layers_packs_alone(store):
    manifest = publish_files(store, "env", {"a": noise(3, 10_000)})
    [use] = manifest.identity.packs
    good = TraceRead(use.digest, 4096, 4096)
    bad = [
        TraceRead("/etc/shadow", 0, 4096),
        TraceRead(use.digest, 0, 1 << 60),
        TraceRead(use.digest, -1, 10),
        TraceRead(use.digest, 0, -1),
    ]
    save_trace(store.layers, Trace(layer=manifest.digest, reads=[*bad, good]))
    found = load_trace(store.layers, manifest.digest)
    assert found is not None
    assert found.reads == [good]
