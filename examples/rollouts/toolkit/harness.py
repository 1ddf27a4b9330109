"""The agent's hands: a script that runs inside the sandbox and does what the policy outside asks, one JSON line in, one JSON line out.

    {"id": 1, "tool": "run", "args": {"command": "ls"}}
    -> {"id": 1, "ok": true, "result": {...}} or {"id": 1, "ok": false, "error": "..."}

Standard library only. It ends at end of input. It holds nothing that an agent must not have: no key, no test, no verdict.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MAX_OUTPUT = 32 * 1024
MAX_FILE = 1024 * 1024
MAX_MATCHES = 200
MAX_RUN_SECONDS = 120.0


class ToolError(Exception):
    """The tool could not do it; the text goes to the policy."""


def read(path: str, start: int = 1, lines: int = 400) -> dict[str, Any]:
    """Lines of a text file, from line `start` (1 is the first)."""
    text = _load(path).splitlines(keepends=True)
    piece = "".join(text[max(start, 1) - 1 : max(start, 1) - 1 + lines])
    return {"text": _clip(piece), "lines": len(text)}


def edit(path: str, old: str, new: str) -> dict[str, Any]:
    """Replace `old`, which must occur exactly once, by `new`. An empty `old` makes a new file."""
    if not old:
        if Path(path).exists():
            raise ToolError(f"{path} exists already; give the text to replace")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(new.encode())
        return {"replaced": 0}
    text = _load(path)
    found = text.find(old)
    if found < 0:
        raise ToolError(f"the text to replace does not occur in {path}")
    if found != text.rfind(old):
        raise ToolError(f"the text to replace occurs more than once in {path}")
    Path(path).write_bytes(text.replace(old, new).encode())
    return {"replaced": 1}


def search(pattern: str, path: str = ".") -> dict[str, Any]:
    """Lines that match a regular expression, below a folder or in a file: `path:line: text`."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ToolError(f"bad pattern: {error}") from None
    matches: list[str] = []
    for file in _files_below(path):
        try:
            text = file.read_bytes()
        except OSError:
            continue
        if b"\0" in text[:1024]:
            continue
        for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
            if expression.search(line):
                matches.append(f"{file}:{number}: {line[:300]}")
                if len(matches) >= MAX_MATCHES:
                    return {"matches": matches, "more": True}
    return {"matches": matches, "more": False}


def run(command: str, cwd: str | None = None, timeout: float = 60.0) -> dict[str, Any]:
    """A shell command. Its output is clipped in the middle; at the deadline its process group is killed."""
    # The output goes to a file: a background child that keeps a pipe open would hold the answer back.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        timed_out = False
        try:
            code = process.wait(min(timeout, MAX_RUN_SECONDS))
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return {"exit_code": code, "timed_out": timed_out, "output": _read_clipped(output)}


def _read_clipped(output: BinaryIO) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= MAX_OUTPUT:
        return output.read().decode(errors="replace")
    head = output.read(MAX_OUTPUT // 2)
    output.seek(size - MAX_OUTPUT // 2)
    return f"{head.decode(errors='replace')}\n[... {size - MAX_OUTPUT} bytes left out ...]\n{output.read().decode(errors='replace')}"


def _clip(text: str) -> str:
    return text if len(text) <= MAX_OUTPUT else f"{text[:MAX_OUTPUT]}\n[... {len(text) - MAX_OUTPUT} characters left out ...]"


def _load(path: str) -> str:
    file = Path(path)
    if not file.is_file():
        raise ToolError(f"{path} is not a file")
    if file.stat().st_size > MAX_FILE:
        raise ToolError(f"{path} is larger than {MAX_FILE} bytes")
    try:
        # Bytes, not read_text: line ends stay what they are.
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not text") from None


def _files_below(path: str) -> list[Path]:
    if Path(path).is_file():
        return [Path(path)]
    files: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in {".git", "__pycache__"})
        files += (Path(folder) / name for name in sorted(names) if (Path(folder) / name).is_file())
    return files


TOOLS: dict[str, Callable[..., dict[str, Any]]] = {"read": read, "edit": edit, "search": search, "run": run}


def answer(line: bytes) -> dict[str, Any]:
    """One request to one reply; what goes wrong is in the reply, never raised."""
    request_id = None
    try:
        request = json.loads(line)
        request_id = request.get("id")
        tool = TOOLS.get(request["tool"])
        if tool is None:
            raise ToolError(f"no tool {request['tool']!r}; there are {', '.join(TOOLS)}")
        return {"id": request_id, "ok": True, "result": tool(**request.get("args", {}))}
    except (ToolError, OSError) as error:
        return {"id": request_id, "ok": False, "error": str(error)}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return {"id": request_id, "ok": False, "error": f"bad request: {type(error).__name__}: {error}"}


def main() -> None:
    """Serve standard input until its end."""
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(answer(line)).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
