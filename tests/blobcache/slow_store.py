"""A store that misbehaves: a folder shown read-only through /dev/fuse by a process that delays, stalls, cuts, spoils or refuses reads.

    python slow_store.py SOURCE TARGET LOG

It obeys lines on stdin, each answered by `ok` on stdout: `delay SECONDS`, `rate BYTES_PER_SECOND`, `stall 0|1`, `eio 0|1`, `corrupt 0|1`,
`truncate BYTES` (-1: not). Each read is one line in LOG: `name offset size`. End of stdin unmounts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
import threading
import time
from pathlib import Path

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 25, 26, 27, 28, 29, 36, 42
HEADER = struct.Struct("<IIQQIIII")
ASYNC_READ, MAX_PAGES = 1 << 0, 1 << 22
MIB = 1 << 20
MNT_DETACH = 2


class Store:
    """The tree below `source`; node ids are indexes into `paths`."""

    def __init__(self, source: Path, log: Path) -> None:
        self.paths = [source, source]
        self.nodes: dict[Path, int] = {source: 1}
        self.files: dict[int, int] = {}
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.lock = threading.Lock()
        self.settings = {"delay": 0.0, "rate": 0.0, "stall": 0.0, "eio": 0.0, "corrupt": 0.0, "truncate": -1.0}
        self.free_at = 0.0
        self.changed = threading.Condition()

    def node(self, path: Path) -> int:
        with self.lock:
            if path not in self.nodes:
                self.nodes[path] = len(self.paths)
                self.paths.append(path)
            return self.nodes[path]

    def attributes(self, node: int) -> bytes:
        found = os.lstat(self.paths[node])
        size = found.st_size
        if stat.S_ISREG(found.st_mode) and (limit := self.settings["truncate"]) >= 0:
            size = min(size, int(limit))
        times = [int(found.st_atime), int(found.st_mtime), int(found.st_ctime)]
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, *times, 0, 0, 0, found.st_mode, 1, 0, 0, 0, 4096, 0)

    def wait(self, size: int) -> None:
        """What a slow link costs: a delay for each request, and one after the other the time for its bytes."""
        with self.changed:
            while self.settings["stall"]:
                self.changed.wait()
        if rate := self.settings["rate"]:
            with self.lock:
                begin = max(self.free_at, time.monotonic())
                self.free_at = begin + size / rate
            time.sleep(max(0.0, self.free_at - time.monotonic()))
        if delay := self.settings["delay"]:
            time.sleep(delay)

    def read(self, node: int, handle: int, offset: int, size: int) -> bytes:
        os.write(self.log, f"{self.paths[node].name} {offset} {size}\n".encode())
        self.wait(size)
        if self.settings["eio"]:
            raise OSError(errno.EIO, "as told")
        if (limit := self.settings["truncate"]) >= 0:
            size = max(0, min(size, int(limit) - offset))
        data = os.pread(handle, size, offset)
        return bytes(byte ^ 0x55 for byte in data) if self.settings["corrupt"] else data

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        valid = struct.pack("<QQII", 0, 0, 0, 0)
        match opcode:
            case 1:
                self.wait(0)
                path = self.paths[node] / os.fsdecode(body.split(b"\0", 1)[0])
                path.lstat()
                child = self.node(path)
                return struct.pack("<QQ", child, 0) + valid + self.attributes(child)
            case 3:
                self.wait(0)
                return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
            case 14:
                self.wait(0)
                return struct.pack("<QII", os.open(self.paths[node], os.O_RDONLY | os.O_CLOEXEC), 0, 0)
            case 15:
                handle, offset, size = struct.unpack_from("<QQI", body)
                return self.read(node, handle, offset, size)
            case 18:
                os.close(struct.unpack_from("<Q", body)[0])
                return b""
            case 27:
                self.wait(0)
                return struct.pack("<QII", 0, 0, 0)
            case 28:
                return self.list(node, *struct.unpack_from("<QQI", body)[1:])
            case 17:
                return struct.pack("<QQQQQIIII24x", 1, 1, 1, 1, 1, 4096, 255, 4096, 0)
            case 25 | 29:
                return b""
        raise OSError(errno.ENOSYS, "not here")

    def list(self, node: int, offset: int, size: int) -> bytes:
        out = b""
        for position, name in enumerate(sorted(os.listdir(self.paths[node]))):
            if position < offset:
                continue
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", 999, position + 1, len(raw), 0) + raw
            entry += b"\0" * (-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out


def greet(device: int) -> None:
    """Answer INIT: requests of up to 1 MiB, asynchronous."""
    message = os.read(device, MIB)
    unique = HEADER.unpack_from(message)[2]
    flags = struct.unpack_from("<I", message, HEADER.size + 12)[0]
    out = struct.pack("<IIIIHHIIHHI28x", 7, 31, 4 * MIB, flags & (ASYNC_READ | MAX_PAGES), 256, 256, 4096, 1, 256, 0, 0)
    os.write(device, struct.pack("<IiQ", 16 + len(out), 0, unique) + out)


def serve(device: int, store: Store) -> None:
    """Until unmounted."""
    while True:
        try:
            message = os.read(device, 1 << 16)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOENT):
                continue
            return
        _, opcode, unique, node, *_ = HEADER.unpack_from(message)
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        code, out = 0, b""
        try:
            out = store.answer(opcode, node, message[HEADER.size :])
        except OSError as error:
            code = -(error.errno or errno.EIO)
        with contextlib.suppress(OSError):
            os.writev(device, [struct.pack("<IiQ", 16 + len(out), code, unique), out])


def main() -> None:
    source, target, log = map(Path, sys.argv[1:4])
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"slow-store", os.fsencode(target), b"fuse", 1 | 2 | 4, options) != 0:
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    greet(device)
    store = Store(source, log)
    for _ in range(24):
        threading.Thread(target=serve, args=(device, store), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        name, value = line.split()
        with store.changed:
            store.settings[name] = float(value)
            store.changed.notify_all()
        print("ok", flush=True)
    libc.umount2(os.fsencode(target), MNT_DETACH)
    os._exit(0)


if __name__ == "__main__":
    main()
