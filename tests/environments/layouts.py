"""OCI layouts for tests, made by hand."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile

__all__ = ["CONFIGURATION", "MACHINE", "MANIFEST", "Layout", "file", "folder", "tar_of", "zstd"]

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIGURATION = {
    "Env": ["PATH=/usr/bin:/bin", "WITH=a=b", "EMPTY=", "nonsense"],
    "WorkingDir": "/srv",
    "User": "app:staff",
    "Entrypoint": ["/bin/sh", "-c"],
    "Cmd": None,
}
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def tar_of(*members, end=True):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, fields, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            for field, value in {"mode": 0o755, **fields}.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
        length = archive.offset
    return buffer.getvalue() if end else buffer.getvalue()[:length]


def file(name, content=b"", **fields):
    return (name, tarfile.REGTYPE, fields, content or name.encode())


def folder(name, **fields):
    return (name, tarfile.DIRTYPE, fields, b"")


def zstd(data):
    return subprocess.run(["zstd", "-qc"], input=data, check=True, capture_output=True).stdout


class Layout:
    """An OCI layout under construction."""

    def __init__(self, path):
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.manifests = []

    def blob(self, data, kind):
        digest = hashlib.sha256(data).hexdigest()
        (self.path / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def image(self, layers, *, configuration=CONFIGURATION, compress=gzip.compress, name=None, architecture=None):
        config = {
            "architecture": architecture or MACHINE,
            "os": "linux",
            "config": configuration,
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": [self.blob(compress(layer), "layer.v1.tar+gzip") for layer in layers],
        }
        descriptor = self.blob(json.dumps({"mediaType": MANIFEST, **manifest}).encode(), "manifest.v1+json")
        if name:
            descriptor["annotations"] = {"org.opencontainers.image.ref.name": name}
        if architecture:
            descriptor["platform"] = {"os": "linux", "architecture": architecture}
        self.manifests.append(descriptor)
        return self

    def index(self, name):
        """Let one index of this name stand for all images so far."""
        inner = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": self.manifests}
        descriptor = self.blob(json.dumps(inner).encode(), "index.v1+json")
        self.manifests = [{**descriptor, "annotations": {"org.opencontainers.image.ref.name": name}}]

    def layers_of(self, number):
        """The descriptors of an image's layers."""
        digest = self.manifests[number]["digest"]
        return json.loads((self.path / "blobs/sha256" / digest[7:]).read_text())["layers"]

    def write(self):
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))
        return self.path
