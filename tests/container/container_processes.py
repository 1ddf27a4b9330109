"""What /proc tells of a sandbox's processes."""

from pathlib import Path


def init_of(box) -> int:
    (pid,) = (box.group() / "cgroup.procs").read_text().split()
    return int(pid)


def status(pid: int, field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0])
