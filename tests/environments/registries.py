"""A registry of one's own on loopback: the read-only half of the OCI distribution protocol over an OCI layout."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["Registry", "serve"]

_PATH = re.compile(r"/v2/(?P<name>[a-z0-9/]+)/(?P<kind>manifests|blobs)/(?P<what>[A-Za-z0-9:._-]+)")


class Registry:
    """`host` is its address; `fetched` the digests of blobs that were asked for. With `credentials` (user, password) others are refused."""

    def __init__(self, layout: Path, credentials: tuple[str, str] | None) -> None:
        self.layout = layout
        self.fetched: list[str] = []
        self.broken = False
        self.host = ""
        self.expected = "Basic " + base64.b64encode(":".join(credentials).encode()).decode() if credentials else None

    def manifest(self, what: str) -> tuple[bytes, str] | None:
        """A manifest's or index's bytes by tag or digest, and its digest."""
        digest = what
        if not what.startswith("sha256:"):
            index = json.loads((self.layout / "index.json").read_text())
            found = [
                one["digest"] for one in index["manifests"] if one.get("annotations", {}).get("org.opencontainers.image.ref.name") == what
            ]
            if not found:
                return None
            digest = found[0]
        path = self.blob(digest)
        return (path.read_bytes(), digest) if path.exists() else None

    def blob(self, digest: str) -> Path:
        return self.layout / "blobs/sha256" / digest.removeprefix("sha256:")


@contextlib.contextmanager
def serve(layout: Path, *, credentials: tuple[str, str] | None = None) -> Iterator[Registry]:
    """A registry over the layout, until the end of the block."""
    registry = Registry(layout, credentials)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

        def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            if registry.expected is not None and self.headers.get("Authorization") != registry.expected:
                self._answer(401, b'{"errors": [{"code": "UNAUTHORIZED"}]}', WWW_Authenticate='Basic realm="test"')
                return
            if self.path == "/v2/":
                self._answer(200, b"{}")
                return
            match = _PATH.fullmatch(self.path)
            if match is None:
                self._answer(404)
            elif match["kind"] == "manifests":
                found = registry.manifest(match["what"])
                if found is None:
                    self._answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}')
                else:
                    kind = json.loads(found[0])["mediaType"]
                    self._answer(200, found[0], Content_Type=kind, Docker_Content_Digest=found[1])
            else:
                registry.fetched.append(match["what"])
                path = registry.blob(match["what"])
                data = path.read_bytes()
                self._answer(200, data[: len(data) // 2] if registry.broken else data, Content_Type="application/octet-stream")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    registry.host = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
