"""`dsec cp`: files and folders into and out of a sandbox."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from dsec.cli.options import JsonOption, TokenOption, UrlOption, with_client
from dsec.cli.output import die, print_json
from libdsec import DSecClient
from libdsec.errors import DSecError, InvalidArgument, NotFound
from libdsec.sandbox import Sandbox

__all__ = ["register", "split"]


def split(text: str) -> tuple[str | None, str]:
    """`SANDBOX:/path` as its parts; a local path has no sandbox. A local name with a colon is written ./name."""
    head, colon, tail = text.partition(":")
    if colon and head.startswith("sb-") and "/" not in head:
        return head, tail or "/"
    return None, text


async def _kind(sandbox: Sandbox, path: str) -> str | None:
    try:
        return (await sandbox.files.stat(path, follow=True)).kind
    except NotFound:
        return None


async def _up(sandbox: Sandbox, source: Path, path: str) -> str:
    """As cp -r does: into `path` if that is a folder (or ends with a slash), else to be it."""
    name, is_folder = await asyncio.to_thread(_look, source)
    into_folder = path.endswith("/") or await _kind(sandbox, path) == "directory"
    target = f"{path.rstrip('/')}/{name}" if into_folder else path
    if is_folder:
        await sandbox.files.upload_tree(source, target)
    else:
        await sandbox.files.upload(source, target)
    return target


def _look(source: Path) -> tuple[str, bool]:
    """Its name, also of `.` and `..`, and whether it is a folder."""
    if not source.exists():
        raise NotFound(f"{source} is not there", field="SOURCE")
    return source.resolve().name, source.is_dir()


async def _down(sandbox: Sandbox, path: str, target: Path) -> str:
    kind = await _kind(sandbox, path)
    if kind is None:
        raise NotFound(f"{path} is not there in {sandbox.sandbox_id}", field="SOURCE")
    if kind not in ("file", "directory"):
        raise InvalidArgument(f"{path} is a {kind}; only files and folders are copied", field="SOURCE")
    name = path.rstrip("/").rpartition("/")[2]
    if str(target) == "-":
        if kind != "file":
            raise InvalidArgument(f"{path} is a {kind}; only a file can go to stdout", field="TARGET")
        async with aclosing(sandbox.files.stream(path)) as pieces:
            async for piece in pieces:
                sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return "-"
    if await asyncio.to_thread(target.is_dir) and name not in ("", ".", ".."):
        target = target / name
    if kind == "directory":
        await sandbox.files.download_tree(path, target)
    else:
        await sandbox.files.download(path, target)
    return str(target)


def _cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path here, or SANDBOX:path.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path here, SANDBOX:path, or - for stdout.")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    token: TokenOption = None,
) -> None:
    """Copy a file or a folder with all in it between here and a sandbox."""
    from_sandbox, from_path = split(source)
    to_sandbox, to_path = split(target)
    try:
        if (from_sandbox is None) == (to_sandbox is None):
            raise InvalidArgument("exactly one of SOURCE and TARGET is SANDBOX:path (sb-...:/path)", field="SOURCE")
    except DSecError as error:
        die(error, as_json=as_json)

    async def work(client: DSecClient) -> str:
        sandbox = await client.get(from_sandbox or to_sandbox or "")
        if to_sandbox is not None:
            return await _up(sandbox, Path(from_path), to_path)
        return await _down(sandbox, from_path, Path(to_path))

    made = with_client(url, token, work, as_json=as_json)
    if as_json:
        print_json({"source": source, "target": f"{to_sandbox}:{made}" if to_sandbox else made})


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("cp")(_cp)
