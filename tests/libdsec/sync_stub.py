"""Writes src/libdsec/sync.pyi: the types of the blocking twin, from the source of the async SDK. Run it as a program after a change there.

The twin itself is made when it is imported, which no type checker or editor can follow.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "libdsec"
STUB = SOURCE / "sync.pyi"
CLASSES = {
    "client": ["DSecClient"],
    "files": ["Files"],
    "ports": ["PortHttp", "TcpConnection"],
    "process": ["Process"],
    "sandbox": ["Sandbox"],
    "session": ["Session"],
    "stream": ["ProcessStream"],
}
TWINS = [name for names in CLASSES.values() for name in names]
BLOCKING = {"AsyncIterable": "Iterable", "AsyncIterator": "Iterator", "AsyncGenerator": "Generator"}
SPECIAL = {"__init__": "__init__", "__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}


def twin_types(text: str) -> str:
    """Names of async protocols as their blocking ones; a Generator has three parameters where an AsyncGenerator has two."""
    text = re.sub(r"AsyncGenerator\[(.*), None\]", r"Iterator[\1]", text)
    return re.sub("|".join(BLOCKING), lambda found: BLOCKING[found.group()], text)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    shown = ast.FunctionDef(
        name=SPECIAL.get(node.name, node.name),
        args=node.args,
        body=[ast.Expr(ast.Constant(...))],
        decorator_list=node.decorator_list,
        returns=node.returns,
    )
    ast.fix_missing_locations(shown)
    lines = twin_types(ast.unparse(shown)).splitlines()
    lines[-2:] = [f"{lines[-2]} ..."]
    return "\n".join(f"    {line}" for line in lines)


def class_stub(node: ast.ClassDef) -> str:
    lines = [f"class {node.name}:"]
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            lines.append("    " + twin_types(ast.unparse(item)))
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and (item.name in SPECIAL or not item.name.startswith("_")):
            lines.append(signature(item))
    return "\n".join(lines)


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Where each imported name comes from."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.name: node.module for alias in node.names}
    return found


def render() -> str:
    bodies: list[str] = []
    sources: dict[str, str] = {"Iterator": "collections.abc", "Iterable": "collections.abc"}
    aliases: list[str] = []
    for module, names in CLASSES.items():
        tree = ast.parse((SOURCE / f"{module}.py").read_text())
        sources |= imports_of(tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                bodies.append(class_stub(node))
            elif isinstance(node, ast.ClassDef) and node.name not in TWINS:
                sources[node.name] = f"libdsec.{module}"
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "Content":
                aliases.append(twin_types(ast.unparse(node)))
    package = ast.parse((SOURCE / "__init__.py").read_text())
    exported = next(ast.literal_eval(node.value) for node in package.body if isinstance(node, ast.Assign))
    body = "\n\n".join([*aliases, *bodies])
    used = set(re.findall(r"\b[A-Za-z_]\w*\b", body))
    wanted: dict[str, list[str]] = {}
    for name in sorted(used & sources.keys() - set(TWINS) - set(exported)):
        wanted.setdefault(sources[name], []).append(name)
    lines = [f"from {module} import {', '.join(names)}" for module, names in wanted.items()]
    lines += [f"from libdsec import {name} as {name}" for name in exported if name not in TWINS]
    lines += ["import os", "from libdsec import streaming"]
    everything = sorted({*TWINS, *exported})
    listed = "__all__ = [\n" + "".join(f"    {name!r},\n" for name in everything) + "]"
    return "\n".join(sorted(lines)) + f"\n\n{listed}\n\n{body}\n"


def written() -> str:
    """The stub in the form that the linter wants."""
    ruff = [sys.executable, "-m", "ruff"]
    text = render()
    for arguments in (["check", "--fix", "--quiet", "--select", "F401,I,RUF022"], ["format", "--quiet"]):
        done = subprocess.run(
            [*ruff, *arguments, "--stdin-filename", str(STUB), "-"], input=text, capture_output=True, text=True, check=True
        )
        text = done.stdout
    return text


if __name__ == "__main__":
    STUB.write_text(written())
