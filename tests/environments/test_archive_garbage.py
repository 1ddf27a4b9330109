"""Whatever bytes an archive is made of, the answer is a tree or a typed refusal. Mutations are seeded: a failure comes again."""

from __future__ import annotations

import io
import random
import subprocess

import pytest
from trees import fill

from dsec.environments.erofs import write_image
from dsec.environments.packs import Packer
from dsec.environments.sources.archives import Budget, read_layer, read_tar
from dsec.environments.sources.builder import TreeBuilder
from dsec.environments.sources.grounding import ground
from dsec.environments.sources.streams import Stream
from libdsec.errors import InvalidArgument, QuotaExceeded

pytestmark = [pytest.mark.root, pytest.mark.slow]

FORMATS = [
    ["--format=pax", "--xattrs", "--xattrs-include=*"],
    ["--format=gnu"],
    ["--format=v7"],
    ["--sparse", "--format=gnu"],
    ["--sparse", "--format=pax", "--sparse-version=1.0"],
    ["--sparse", "--format=pax", "--sparse-version=0.0"],
]
NUMBERS = [100, 108, 116, 124, 136, 329, 337, 386, 398, 483]
"""Where headers hold numbers."""


def mutate(data: bytearray, rng: random.Random) -> None:
    block = rng.randrange(len(data) // 512) * 512
    choice = rng.random()
    if choice < 0.6:
        data[block + rng.randrange(512)] = rng.choice([0, 0x20, 0x2E, 0x2F, 0x30, 0x37, 0x80, 0xFF, rng.randrange(256)])
    elif choice < 0.8:
        width, start = rng.choice([8, 12]), block + rng.choice(NUMBERS)
        data[start : start + width] = bytes(rng.choice([0x80, 0xFF, 0x37, 0x30, rng.randrange(256)]) for _ in range(width))
    else:
        other = rng.randrange(len(data) // 512) * 512
        data[block : block + 512] = data[other : other + 512]
    if rng.random() < 0.9:  # else the check of the sum would be all that is tried
        header = data[block : block + 512]
        data[block + 148 : block + 156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 256)


@pytest.mark.parametrize("form", FORMATS, ids=" ".join)
@pytest.mark.parametrize("layered", [False, True])
def test_a_mutated_archive_gives_a_tree_or_a_refusal(tmp_path, form, layered):
    fill(tmp_path / "tree")
    (tmp_path / "tree/sparse").unlink()
    with (tmp_path / "tree/sparse").open("wb") as file:
        file.seek(100_000)
        file.write(b"x")
        file.truncate(200_000)
    seed = subprocess.run(["tar", "-c", *form, "-C", tmp_path / "tree", "."], check=False, capture_output=True).stdout
    rng = random.Random(" ".join(form))
    refused = read = 0
    for attempt in range(60):
        data = bytearray(seed)
        for _ in range(rng.choice([1, 1, 2, 4, 16])):
            mutate(data, rng)
        folder = tmp_path / f"pack-{attempt}"
        folder.mkdir()
        packer = Packer(folder)
        stream = Stream(io.BytesIO(bytes(data)), lambda: None)
        try:
            if layered:
                tree = ground(read_layer(stream, packer.add, Budget(64 << 20))[0], None)
            else:
                builder = TreeBuilder()
                read_tar(stream, builder, packer.add, Budget(64 << 20))
                tree = builder.finish()
            packer.finish()
            write_image(tree, folder / "image")  # raises for what EROFS cannot hold
            read += 1
        except (InvalidArgument, QuotaExceeded):
            refused += 1
        finally:
            stream.close()
            packer.close()
    assert refused
    assert read
