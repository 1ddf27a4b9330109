"""Random images, with what no honest tool writes, too: as one layer they are what the kernel makes of their layers over each other."""

from __future__ import annotations

import random
import subprocess
import tarfile

import pytest
from layouts import Layout, file, folder, tar_of
from trees import describe

from dsec.environments import build
from libdsec.errors import InvalidArgument

pytestmark = [pytest.mark.root, pytest.mark.slow]

NAMES = ["a", "b", "c", "d"]


def random_layer(rng, number):
    def path():
        return "/".join(rng.choice(NAMES) for _ in range(rng.randrange(1, 4)))

    members = []
    for _ in range(rng.randrange(1, 7)):
        name, choice = path(), rng.random()
        above, _, leaf = name.rpartition("/")
        if choice < 0.35:
            members.append(file(name, f"{name} {number}".encode() * rng.choice([1, 300]), uid=rng.randrange(3)))
        elif choice < 0.55:
            members.append(folder(name, mode=rng.choice([0o700, 0o755])))
        elif choice < 0.68:
            target = rng.choice([path(), "/" + path(), "../" + path(), ".."])
            members.append((name, tarfile.SYMTYPE, {"linkname": target}, b""))
        elif choice < 0.76:
            members.append((name, tarfile.LNKTYPE, {"linkname": path()}, b""))
        elif choice < 0.92:
            members.append(file(f"{above}/.wh.{leaf}".lstrip("/")))
        else:
            members.append(file(f"{name}/.wh..wh..opq"))
    return tar_of(*members)


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_as_one_layer_or_as_many_an_image_is_the_same(store, tmp_path, start):
    compared = 0
    target = tmp_path / "over"
    target.mkdir()
    for seed in range(start, start + 100):
        rng = random.Random(seed)
        layers = [random_layer(rng, number) for number in range(3)]
        path = Layout(tmp_path / str(seed)).image(layers, configuration={}).write()
        try:
            build(store, "one", source=f"oci:{path}")
        except InvalidArgument:
            with pytest.raises(InvalidArgument):
                build(store, "many", source=f"oci:{path}", collapse_below=0)
            continue
        build(store, "many", source=f"oci:{path}", collapse_below=0)
        [one] = store.acquire(store.resolve(["one"]).digests, "sb-one")
        many = store.acquire(store.resolve(["many"]).digests, "sb-many")
        options = "ro,lowerdir=" + ":".join(reversed(many))
        subprocess.run(["mount", "-t", "overlay", "none", target, "-o", options], check=True)
        try:
            # names of one file apart: a file of a lower layer and its name in an upper one are two inodes to overlayfs
            assert {name: facts[:7] for name, facts in describe(one).items()} == {
                name: facts[:7] for name, facts in describe(target).items()
            }
        finally:
            subprocess.run(["umount", target], check=True)
        compared += 1
    assert compared >= 5
