"""Workers on two nodes that build, name, use and collect in one store, killed at any point. Run as a program; forks, so it has no threads.

garbage_driver.py FOLDER SEED SECONDS      prints a line of JSON: what was acknowledged, how many were killed, what went wrong
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from layering import noise, publish_files, read_files

from dsec.environments import EnvironmentStore
from dsec.environments.names import parse_reference
from libdsec.errors import NotFound, SandboxFailed

NODES = ("north", "south")
"""A worker with an even number is on the first, one with an odd number on the second."""
CONTENTS = 6
EVERYTHING = [*["build", "snapshot", "use", "collect"] * 2, "retag", "remove", "release", "import", "trace"]
TRADES = [EVERYTHING, ["build", "build", "remove", "retag", "import"], EVERYTHING, ["sweep"]]
"""What each worker does; the last one does nothing but collect, as fast as it can."""


def contents(recipe):
    """The files of a layer, from what its manifest says it is made of."""
    return {f"f{number}": noise(number, 600 + 3000 * (number % 5)) for number in json.loads(recipe)}


def open_node(top, name):
    return EnvironmentStore(top / name / "state", top / name / "run", top / "store")


class Worker:
    """Does random things with names of its own, and writes down what it is about to do and what it has done."""

    def __init__(self, top, number, rng):
        self.number = number
        self.rng = rng
        self.node = open_node(top, NODES[number % len(NODES)])
        self.log = (top / f"log-{number}").open("a")
        self.names = [f"w{number}/env:{tag}" for tag in "abc"]
        self.owners = [f"w{number}-sb{index}" for index in range(2)]
        self.tags = {name: self.meaning(name) for name in self.names}

    def meaning(self, name):
        with contextlib.suppress(NotFound):
            return self.node.layers.digest_of(parse_reference(name))
        return None

    def note(self, **fields):
        self.log.write(json.dumps(fields) + "\n")
        self.log.flush()

    def step(self):
        getattr(self, self.rng.choice(TRADES[self.number]))()

    def recipe(self):
        return json.dumps(sorted(self.rng.sample(range(CONTENTS), self.rng.randrange(1, 3))))

    def named(self, name, digest):
        self.tags[name] = digest
        self.note(name=name, digest=digest)

    def build(self):
        name, recipe = self.rng.choice(self.names), self.recipe()
        self.note(begin=name)
        self.named(name, publish_files(self.node, name, contents(recipe), source=recipe).digest)

    def import_(self):
        recipe = self.recipe()
        publish_files(self.node, "", contents(recipe), source=recipe, kind="toolkit", imported=f"{self.rng.randrange(6):064x}")

    def snapshot(self):
        held = [name for name in self.names if self.tags[name]]
        if not held:
            return
        parent, name, recipe = self.rng.choice(held), self.rng.choice(self.names), self.recipe()
        digests = self.node.resolve([parent]).digests
        if len(digests) > 4:
            return
        owner = f"w{self.number}-parent"
        self.node.acquire(digests, owner)
        self.note(begin=name)
        made = publish_files(self.node, name, contents(recipe), source=recipe, kind="snapshot", below=digests)
        self.named(name, made.digest)
        self.node.release(owner)

    def retag(self):
        held = [name for name in self.names if self.tags[name]]
        if not held:
            return
        old, new = self.rng.choice(held), self.rng.choice(self.names)
        self.note(begin=new)
        with self.node.layers.settled(exclusive=False):
            self.node.layers.set_tag(parse_reference(new), self.tags[old])
        self.named(new, self.tags[old])

    def remove(self):
        name = self.rng.choice(self.names)
        self.note(begin=name)
        removed = self.node.layers.tags.remove(parse_reference(name))
        assert removed == (self.tags[name] is not None), name
        self.named(name, None)

    def use(self):
        """What is named stays whole while it is: only this worker takes these names away."""
        name = self.rng.choice(self.names)
        if self.tags[name] is None:
            return
        digests = self.node.resolve([name]).digests
        assert digests[-1] == self.tags[name], name
        owner = self.rng.choice(self.owners)
        self.note(owner=owner, begin_use=True)
        paths = self.node.acquire(digests, owner)
        for path, digest in zip(paths, digests, strict=True):
            assert read_files(path) == contents(self.node.layers.manifest(digest).source), name
        self.note(owner=owner, digests=digests)

    def release(self):
        owner = self.rng.choice(self.owners)
        self.note(owner=owner, begin_use=True)
        self.node.release(owner)
        self.note(owner=owner, digests=[])

    def trace(self):
        digest = self.tags[self.rng.choice(self.names)]
        if digest is not None:
            (self.node.layers.root / "traces" / f"{digest[7:]}.json").write_text("[]")

    def collect(self):
        self.node.collect_garbage(grace_seconds=self.rng.choice([0, 0, 0.05, 0.2]))

    def sweep(self):
        self.node._garbage.collect(grace_seconds=self.rng.choice([0, 0, 0.02]))


setattr(Worker, "import", Worker.import_)


def shake(rng):
    """Let others run at the points where it matters; a killed process loses nothing that it wrote, so that nothing need reach the disk."""
    os.fsync = lambda fd: None
    for module, name in ((fcntl, "flock"), (os, "rename"), (os, "utime"), (os, "listdir"), (os, "unlink"), (os, "stat")):
        setattr(module, name, shaken(getattr(module, name), rng))


def shaken(function, rng):
    def call(*args, **kwargs):
        if rng.random() < 0.05:
            time.sleep(rng.uniform(0, 0.004))
        return function(*args, **kwargs)

    return call


def run_worker(top, number, seed):
    try:
        shake(random.Random(seed))
        worker = Worker(top, number, random.Random(seed))
        while True:
            worker.step()
    except BaseException:
        (top / f"failure-{os.getpid()}").write_text(traceback.format_exc())
    os._exit(3)


def drive(top, seed, seconds):
    rng = random.Random(seed)
    for node in NODES:
        open_node(top, node).layers.prepare()
    started = {}
    killed = rounds = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for number in range(len(TRADES)):
            if number not in started:
                rounds += 1
                pid = os.fork()
                if pid == 0:
                    run_worker(top, number, seed * 1000 + rounds)
                started[number] = pid
        time.sleep(rng.uniform(0.005, 0.3))
        if list(top.glob("failure-*")):
            break
        number = rng.choice(list(started))
        os.kill(started[number], signal.SIGKILL)
        os.waitpid(started.pop(number), 0)
        killed += 1
    for pid in started.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return killed


def acknowledged(top):
    """What each name meant last and each owner used last, None where something was begun and not ended."""
    names, owners = {}, {}
    for log in sorted(top.glob("log-*")):
        for line in log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if "begin" in entry:
                    names.pop(entry["begin"], None)
                elif "name" in entry:
                    names[entry["name"]] = entry["digest"]
                elif "begin_use" in entry:
                    owners.pop(entry["owner"], None)
                else:
                    owners[entry["owner"]] = entry["digests"]
    return names, owners


def check(top):
    """After everything: what is referred to is whole, and after a last collection there is nothing else."""
    nodes = [open_node(top, name) for name in NODES]
    layers = nodes[0].layers
    names, owners = acknowledged(top)
    for name, digest in names.items():
        with contextlib.suppress(NotFound):
            assert layers.digest_of(parse_reference(name)) == digest, f"{name} lost what it meant"
            continue
        assert digest is None, f"{name} is gone"
    for node in nodes:
        uses = node.node.uses()
        for owner, digests in owners.items():
            if NODES[int(owner[1]) % len(NODES)] == node.state.parent.name:
                assert {digest for digest, holders in uses.items() if owner in holders} == set(digests), owner
        node.sweep_mounts(node.node.owners)
        for owner in node.node.owners():
            digests = [digest for digest, holders in uses.items() if owner in holders]
            for path, digest in zip(node.acquire(digests, owner), digests, strict=True):
                assert read_files(path) == contents(layers.manifest(digest).source), f"{owner} sees something else"
    for _ in range(2):
        report = nodes[0].collect_garbage(grace_seconds=0)
    assert not report.unreadable
    living = {digest for node in nodes for digest in node.node.uses()}
    for reference, digest in layers.tags.all():
        resolved = nodes[1].resolve([str(reference)])
        assert resolved.digests[-1] == digest
        living.update(resolved.digests)
        for path, each in zip(nodes[1].acquire(resolved.digests, "reader"), resolved.digests, strict=True):
            assert read_files(path) == contents(layers.manifest(each).source), f"{reference} is something else"
    nodes[1].release("reader")
    packs = {use.digest for digest in living for use in layers.manifest(digest).identity.packs}
    imported = {(layers.root / "imports" / name).read_text().strip() for name in os.listdir(layers.root / "imports")}
    assert {use.digest for digest in imported for use in layers.manifest(digest).identity.packs} <= packs
    assert layers.layers() == living | imported
    assert layers.packs.digests() == packs
    assert len(os.listdir(layers.packs.folder)) == 2 * len(packs)
    assert {f"sha256:{name[:64]}" for name in os.listdir(layers.root / "traces")} <= living | imported
    assert os.listdir(layers.root / "condemned") == []
    assert os.listdir(layers.root / "building") == []
    assert all(layers.damage(digest) is None for digest in living)
    return {"layers": len(living), "packs": len(packs), "imports": len(imported)}


def main():
    top, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    result = {"seed": seed}
    try:
        result["killed"] = drive(top, seed, seconds)
        result["steps"] = sum(len(log.read_text().splitlines()) for log in top.glob("log-*"))
        result["failures"] = [path.read_text() for path in top.glob("failure-*")]
        result |= check(top)
    except (AssertionError, NotFound, SandboxFailed):
        result.setdefault("failures", []).append(traceback.format_exc())
    finally:
        for name in NODES:
            with contextlib.suppress(OSError):
                open_node(top, name).sweep_mounts([])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
