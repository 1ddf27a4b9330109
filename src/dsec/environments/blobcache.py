"""How a node reaches the store's packs: directly, or through a server of our own that has deadlines and a cache.

EROFS reads packs in the kernel, on behalf of guests. Where the file system below hangs, guests hang uninterruptibly; where a file there is
shorter than it was, the kernel gives them zeros. A local disk does neither. So what is on anything else (FUSE, NFS, 9p, ...) is read
through `dsec-native blobcache`, which answers every read in time, with an error if need be.

    <run>/packs/          the server's mount
    <run>/packs.sock      its control socket: a line in, a JSON object out
    <state>/blocks/       its cache, if it has one

The server is its own process and outlives edge: the mount and the socket are how it is found again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import msgspec

from dsec._native import NativeBinaryMissing, native_binary
from dsec.environments.manifest import PackUse
from dsec.kernel.mountinfo import mount_at, mount_over
from dsec.kernel.mounts import unmount
from libdsec.errors import SandboxFailed

__all__ = [
    "LOCAL_KINDS",
    "PackAccess",
    "PackEvent",
    "PackReads",
    "PackServerStatus",
    "StoreSettings",
    "kind_of",
    "parse_size",
    "parse_way",
    "store_answers",
]

LOCAL_KINDS: Final = frozenset(
    {"bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "squashfs", "tmpfs", "xfs", "zfs"}
)
"""File systems whose reads end: the disk answers, or its driver gives up."""

_ASK_SECONDS: Final = 5.0
_STEPS_MAX: Final = 200
_START_SECONDS: Final = 20.0
_END_SECONDS: Final = 5.0
_KNOW_AT_ONCE: Final = 256
_MIB: Final = 1 << 20

Way = Literal["auto", "direct", "server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How a node treats its store."""

    way: Way = "auto"
    """`auto`: the server where the store is not on a local disk, or a cache or verified reads are wanted."""
    cache_bytes: int = 0
    """Size of the cache of blocks on the local disk; 0: none."""
    memory_bytes: int = 64 * _MIB
    block_bytes: int = 256 << 10
    """The least that is read of the store at once."""
    parallel: int = 16
    """Reads of the store under way at once."""
    patience_seconds: float = 30.0
    """How long a guest's read waits for a store that does not answer, before it fails and the sandbox with it."""
    verify_reads: bool = False
    """See that what is read is what its pack's index says, segments of up to 2 MiB; through the server only."""
    replay: bool = True
    """Read ahead what the recorded trace of an environment says, when it is first mounted."""


class PackServerStatus(msgspec.Struct, kw_only=True):
    """What the server says of itself. `away_ms`: for how long the store has not answered, 0 while it does."""

    keeper: int
    worker: int
    starts: int
    sequence: int
    failed: int
    away_ms: int
    away_error: str
    waiting: int
    fetchers: int
    stuck: int
    memory_bytes: int
    cache_bytes: int
    cache_limit_bytes: int
    cache_evicted: int
    cache_damaged: int
    asked: int
    asked_bytes: int
    hit_bytes: int
    disk_bytes: int
    store_reads: int
    store_bytes: int
    store_errors: int


class PackReads(msgspec.Struct, kw_only=True):
    """What was read of one pack since the server's worker started."""

    size: int
    touched_bytes: int
    asked: int
    asked_bytes: int
    hit_bytes: int
    disk_bytes: int
    store_reads: int
    store_bytes: int
    store_errors: int


class PackEvent(msgspec.Struct, kw_only=True):
    """A read that failed. `group` is the cgroup of who read, empty where that is not known."""

    sequence: int
    at: int
    pack: str
    reason: str
    error: str
    group: str


class _Events(msgspec.Struct):
    sequence: int
    events: list[PackEvent]


class PackAccess:
    """The packs of the store in `packs`, as paths that EROFS can be given. Thread-safe; several processes may share one `run`.

    Who starts or ends the server holds the node's lock on its mounts.
    """

    def __init__(self, state: Path, run: Path, packs: Path, settings: StoreSettings) -> None:
        self.settings = settings
        self.mount = run / "packs"
        self.control = run / "packs.sock"
        self.group: Callable[[], str | None] = lambda: None
        """The cgroup in which the server is to live."""
        self._cache = state / "blocks"
        self._log = run / "packs.log"
        self._packs = packs
        self._lock = threading.Lock()
        self._direct: bool | None = None
        self._local: bool | None = None

    # -- which way -----------------------------------------------------------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        """Whether EROFS is given the store's own files."""
        if self._direct is None:
            self._direct = self._choose() == "direct"
        return self._direct

    def _choose(self) -> Way:
        if self.settings.way != "auto":
            return self.settings.way
        wanted = self.settings.cache_bytes or self.settings.verify_reads
        return "server" if wanted or self.kind() not in LOCAL_KINDS else "direct"

    @property
    def past_cache(self) -> bool:
        """Whether EROFS reads past the store's page cache: how far that reads ahead is not ours to set. A local disk's stays in use."""
        if self._local is None:
            self._local = self.kind() in LOCAL_KINDS
        return self.direct and not self._local

    def kind(self) -> str:
        """The store's file system, asking it nothing."""
        return kind_of(self._packs)

    def device(self, digest: str) -> Path:
        """The file to give to EROFS for the pack `sha256:<hex>`. Starts the server where one is needed and none serves."""
        name = digest.removeprefix("sha256:") + ".data"
        if self.direct:
            return self._packs / name
        self.start()
        return self.mount / name

    def expect(self, packs: Sequence[PackUse]) -> None:
        """These packs were seen in the store with these sizes and are about to be mounted: the server need not ask for them."""
        if self.direct or not packs:
            return
        self.start()
        for at in range(0, len(packs), _KNOW_AT_ONCE):
            names = [f"{use.digest.removeprefix('sha256:')}.data {use.size}" for use in packs[at : at + _KNOW_AT_ONCE]]
            self._ask(" ".join(["know", *names]))

    # -- the server ----------------------------------------------------------------------------------------------------------------------

    def mounted(self) -> bool:
        """Whether the server's mount is there, alive or dead."""
        mount = mount_at(self.mount)
        return mount is not None and mount.source == "dsec-packs"

    def alive(self) -> bool:
        """Whether the server answers."""
        try:
            self.status()
        except OSError:
            return False
        return True

    def start(self) -> None:
        """See that a server serves. One that is dead has to be cleared away by `end` first: EROFS mounts may hang on it."""
        with self._lock:
            if self.mounted():
                return
            self._start()

    def _start(self) -> None:
        settings = self.settings
        self.mount.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            command = [str(native_binary()), "blobcache"]
        except NativeBinaryMissing as error:
            raise SandboxFailed(str(error), cause="launch-failed", ran="not-run") from error
        command += [
            "--store",
            os.path.abspath(self._packs),
            "--mount",
            str(self.mount.absolute()),
            "--control",
            str(self.control.absolute()),
        ]
        command += [f"--memory-bytes={settings.memory_bytes}", f"--block-bytes={settings.block_bytes}", f"--parallel={settings.parallel}"]
        command += [f"--deadline-ms={round(settings.patience_seconds * 1000)}"]
        if settings.verify_reads:
            command += ["--verify"]
        if settings.cache_bytes:
            self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            command += ["--cache", str(self._cache.absolute()), f"--cache-bytes={settings.cache_bytes}"]
        if (group := self.group()) is not None and os.path.isdir(group):
            command += ["--cgroup", group]
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # It detaches: what is waited for here is its start.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=_START_SECONDS, check=False, start_new_session=True
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxFailed(f"the server of packs does not start: {error}", cause="launch-failed", ran="not-run") from error
        finally:
            os.close(log)
        if done.returncode != 0:
            why = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise SandboxFailed(f"the server of packs does not start: {why}", cause="launch-failed", ran="not-run")

    def end(self, *, lazy: bool = False) -> bool:
        """Unmount it; the server ends with its mount. False while something is mounted from it, unless `lazy`. Idempotent."""
        with self._lock:
            deadline = time.monotonic() + _END_SECONDS
            while self.mounted():
                try:
                    unmount(self.mount, lazy=lazy)
                except OSError as error:
                    # The kernel closes the devices of an unmounted EROFS a moment later.
                    if error.errno != errno.EBUSY or time.monotonic() > deadline:
                        return False
                    time.sleep(0.01)
            while self.control.exists() and time.monotonic() < deadline and self.alive():
                time.sleep(0.01)
            self.control.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.mount.rmdir()
        return True

    # -- asking it -----------------------------------------------------------------------------------------------------------------------

    def _ask(self, line: str) -> bytes:
        """OSError where no server answers in time."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_ASK_SECONDS)
            sock.connect(str(self.control))
            sock.sendall(line.encode() + b"\n")
            pieces: list[bytes] = []
            while piece := sock.recv(1 << 16):
                pieces.append(piece)
        if not pieces:
            raise ConnectionResetError(errno.ECONNRESET, "the server of packs hung up")
        return b"".join(pieces)

    def status(self) -> PackServerStatus:
        """OSError where no server answers."""
        return msgspec.json.decode(self._ask("status"), type=PackServerStatus)

    def reads(self) -> dict[str, PackReads]:
        """By pack. OSError where no server answers."""
        found = msgspec.json.decode(self._ask("packs"), type=dict[str, PackReads])
        return {f"sha256:{name}": reads for name, reads in found.items()}

    def events(self, after: int) -> tuple[int, list[PackEvent]]:
        """Failed reads after the sequence number `after`, and the number to ask with next. OSError where no server answers."""
        found = msgspec.json.decode(self._ask(f"events {after}"), type=_Events)
        for event in found.events:
            event.pack = f"sha256:{event.pack}"
        return found.sequence, found.events

    def trace(self, packs: list[str]) -> Any:
        """What was read of `packs` and in what order, as plain data. OSError where no server answers."""
        return msgspec.json.decode(self._ask(" ".join(["trace", *(pack.removeprefix("sha256:") for pack in packs)])))


def kind_of(path: Path) -> str:
    """The kind of file system that holds `path`, by the mount table. Nothing that is not on a local disk is looked at.

    A look may hang, and a process that has a thread hanging in a file system cannot end.
    """
    left = os.path.abspath(path).split("/")[:0:-1]
    at, kind = "/", ""
    for _ in range(_STEPS_MAX):
        mount = mount_over(at)
        kind = mount.kind if mount is not None else ""
        if kind not in LOCAL_KINDS or not left:
            break
        if (step := left.pop()) in ("", "."):
            continue
        if step == "..":
            at = os.path.dirname(at)
            continue
        beyond = mount_over(os.path.join(at, step))
        if beyond is not None and beyond.kind in LOCAL_KINDS and os.path.islink(os.path.join(at, step)):
            target = os.readlink(os.path.join(at, step))
            at = "/" if target.startswith("/") else at
            left += target.split("/")[::-1]
            continue
        at = os.path.join(at, step)
    return kind


def store_answers(store: Path, seconds: float) -> bool:
    """Whether a listing of it comes in time.

    It is asked by a process of its own: one that has a thread hanging in a file system cannot end until that answers.
    """
    if kind_of(store) in LOCAL_KINDS:
        return True
    process = subprocess.Popen(["ls", str(store)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return False
    return True


def parse_way(text: str) -> Way:
    """ValueError for what is none."""
    for way in get_args(Way):
        if text == way:
            return cast("Way", way)
    raise ValueError(f"{text!r} is none of {', '.join(get_args(Way))}")


def parse_size(text: str) -> int:
    """`off`, or a number of bytes with K, M, G or T. ValueError for anything else."""
    if text in ("off", "0"):
        return 0
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    plain = text.upper().removesuffix("B").removesuffix("I")
    factor = units.get(plain[-1:], 1)
    number = plain[:-1] if factor > 1 else plain
    if not number.replace(".", "", 1).isdigit():
        raise ValueError(f"{text!r} is no size: give `off`, or a number with K, M, G or T")
    return int(float(number) * factor)
