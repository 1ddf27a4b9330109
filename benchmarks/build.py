"""An image of at least 1 GB imported: `python -m benchmarks.build --json`.

The same image with its layers as gzip and as zstd: time, CPU, peak memory, bytes written, beside mkfs.erofs over an unpacked tree, umoci
and podman. Then the images of `--images` environments, which share packages, into one store: how much of their bytes is stored; and the
same of ten Debian images as umoci writes them (`--no-debian-images` leaves them out).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.budgets import at_least, at_most
from benchmarks.charged import HOW, Charge
from benchmarks.corpus import Corpus, made_corpus
from benchmarks.images import made_images, sharing
from benchmarks.importers import OURS, PEER_IMPORTS, emptied, import_ours, stored_bytes
from benchmarks.peers import PeerUnavailable
from benchmarks.stage import arguments, main

__all__ = ["measure"]

MB = 1e6
IMAGE_MB = 1050
MEMORY_BUDGET_MB = 256
"""Of the importing process; the image is four times as large."""


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Each importer once a round, on each compression; then the sharing."""
    return await asyncio.to_thread(_measure, options)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if os.geteuid() != 0:
        raise SystemExit("images have owners and devices: run this as root")
    ours: dict[str, dict[str, Any]] = {}
    peers: dict[str, dict[str, Any]] = {}
    corpora = {name: made_corpus(1, quick=options.quick, least_mb=IMAGE_MB, compression=name) for name in options.compressions.split(",")}
    many = made_corpus(options.images, quick=options.quick)
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as work:
        folder = Path(work)
        for name, corpus in corpora.items():
            asyncio.run(options.surroundings.look())
            ours[name] = _ours(options, corpus, folder)
            for peer, (importer, how) in PEER_IMPORTS.items():
                if peer not in options.peers.split(","):
                    continue
                document = peers.setdefault(peer, {"how": how})
                try:
                    imported = [importer(corpus, corpus.images[0], emptied(folder / peer)) for _ in range(options.rounds)]
                    best, stored = min(imported, key=lambda one: one[0].synced_s)
                    document[name] = best.to_json() | {"failures": 0, "stored_mb": round(stored / MB, 1)}
                except PeerUnavailable as error:
                    document[name] = {"absent": str(error)}
                except RuntimeError as error:
                    document[name] = {"absent": f"it failed: {error}"}
                _tell(f"{peer} {name}", document[name])
                emptied(folder / peer)
        shared = _sharing(many, emptied(folder / "many"))
        emptied(folder / "many")
        if options.debian_images and not options.quick:
            shared["debian_images"] = _debian_sharing(folder)
    return _document(options, corpora, many, ours, peers, shared)


def _best(charges: list[Charge]) -> Charge:
    return min(charges, key=lambda charge: charge.synced_s)


def _ours(options: argparse.Namespace, corpus: Corpus, folder: Path) -> dict[str, Any]:
    charges, again = [], []
    for _ in range(options.rounds):
        emptied(folder / "ours")
        charges.append(import_ours(corpus, corpus.images[0], folder=folder / "ours"))
        stored = stored_bytes(folder / "ours" / "store")
        again.append(import_ours(corpus, corpus.images[0], folder=folder / "ours"))
    metadata = sum(path.stat().st_size for path in (folder / "ours" / "store").rglob("metadata.erofs"))
    document = _best(charges).to_json()
    document |= {"failures": 0, "stored_mb": round(stored / MB, 1), "metadata_mb": round(metadata / MB, 2)}
    document |= {"again": _best(again).to_json() | {"failures": 0}}
    _tell(f"dsec {corpus.images[0].layers[0].compression}", document)
    emptied(folder / "ours")
    return document


def _sharing(corpus: Corpus, folder: Path) -> dict[str, Any]:
    """All images into one store, one after another."""
    stored: list[int] = []
    seconds: list[float] = []
    for image in corpus.images:
        seconds.append(import_ours(corpus, image, folder=folder).synced_s)
        stored.append(stored_bytes(folder / "store"))
        print(
            f"{image.name}: {image.tar_bytes / MB:.0f} MB in {seconds[-1]:.1f} s, {stored[-1] / MB:.0f} MB in the store",
            file=sys.stderr,
            flush=True,
        )
    everything = sum(image.tar_bytes for image in corpus.images)
    layers = sum(layer.tar_bytes for layer in corpus.layers())
    return {
        "images": len(corpus.images),
        "images_mb": round(everything / MB),
        "distinct_layers_mb": round(layers / MB),
        "stored_mb": round(stored[-1] / MB, 1),
        "stored_mb_after_each": [round(size / MB) for size in stored],
        "seconds_each": [round(one, 2) for one in seconds],
        "ratio_to_images": round(everything / stored[-1], 2),
        "ratio_to_distinct_layers": round(layers / stored[-1], 2),
        "how": "images_mb: the archives of all images unpacked; distinct_layers_mb: each layer once, as docker and podman keep them",
    }


def _debian_sharing(folder: Path) -> list[dict[str, Any]]:
    """After each of ten images what the store holds."""
    layout, tags = made_images()
    found = []
    for row in sharing(layout, tags, emptied(folder / "debian")):
        found.append(row)
        print(f"{row['image']}: {row['stored_mb_so_far']:.0f} MB stored of {row['logical_mb_so_far']:.0f}", file=sys.stderr, flush=True)
    return found


def _tell(name: str, document: dict[str, Any]) -> None:
    if "absent" in document:
        print(f"{name}: {document['absent']}", file=sys.stderr, flush=True)
    else:
        told = ", ".join(f"{key} {document[key]:g}" for key in ("synced_s", "cpu_s", "peak_rss_mb", "written_mb", "stored_mb"))
        print(f"{name}: {told}", file=sys.stderr, flush=True)


def _document(
    options: argparse.Namespace,
    corpora: dict[str, Corpus],
    many: Corpus,
    ours: dict[str, dict[str, Any]],
    peers: dict[str, dict[str, Any]],
    shared: dict[str, Any],
) -> dict[str, Any]:
    name, corpus = list(corpora.items())[-1]
    today = peers.get("mkfs_erofs", {}).get(name, {}).get("synced_s")
    faster = round(today / ours[name]["synced_s"], 2) if today else None
    return {
        "n": options.rounds,
        "rounds": options.rounds,
        "chosen": "of each the best round",
        "image_mb": round(corpus.images[0].tar_bytes / MB),
        "compressed_mb": round(sum(layer.size for layer in corpus.images[0].layers) / MB),
        "packages": corpus.images[0].packages,
        "how": HOW,
        "dsec": ours | {"how": OURS},
        "peers": peers,
        "sharing": shared | {"corpus": many.to_json()},
        "budgets": {
            f"times_faster_than_mkfs_{name}": at_least(faster, 2),
            "peak_rss_mb": at_most(max(one["peak_rss_mb"] for one in ours.values()), MEMORY_BUDGET_MB, "MB"),
        },
    }


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.set_defaults(peers=",".join(PEER_IMPORTS), rounds=2)
    parser.add_argument("--images", type=int, default=20, help="images whose sharing is measured")
    parser.add_argument("--compressions", default="gzip,zstd", help="of the image's layers; the last one's time is judged")
    parser.add_argument("--debian-images", action=argparse.BooleanOptionalAction, default=True, help="sharing of those too")
    parser.add_argument("--quick", action="store_true", help="small images")
    main("build", measure, parser.parse_args())
