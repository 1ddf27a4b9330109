"""A look at the changed source before it is run: no fix of this kind reaches for the interpreter's insides.

The tested code shares a process with its tests, so code that is written against the verifier could answer for the tests it knows. What
such code needs (frames, the garbage collector, descriptors, the test framework) is what a fix does not. A name counts only if the
pristine package does not use it too. This is one wall of several and not a proof: Python has more ways than a list can hold.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

__all__ = ["objections"]

_MODULES = frozenset(
    [
        "_posixsubprocess",
        "_thread",
        "asyncio",
        "atexit",
        "builtins",
        "code",
        "codeop",
        "concurrent",
        "ctypes",
        "faulthandler",
        "fcntl",
        "gc",
        "imp",
        "importlib",
        "inspect",
        "io",
        "marshal",
        "mmap",
        "multiprocessing",
        "nt",
        "os",
        "pathlib",
        "pdb",
        "pickle",
        "pkgutil",
        "platform",
        "posix",
        "pytest",
        "pty",
        "resource",
        "runpy",
        "select",
        "shutil",
        "signal",
        "site",
        "socket",
        "subprocess",
        "sys",
        "sysconfig",
        "tempfile",
        "threading",
        "trace",
        "traceback",
        "tracemalloc",
        "unittest",
        "_pytest",
        "zipimport",
    ]
)
_NAMES = frozenset(
    [
        "__import__",
        "compile",
        "eval",
        "exec",
        "open",
        "globals",
        "locals",
        "vars",
        "breakpoint",
        "__builtins__",
        "__loader__",
        "__spec__",
        "getattr",
        "setattr",
        "delattr",
    ]
)
_ATTRIBUTES = frozenset(
    [
        "__bases__",
        "__base__",
        "__builtins__",
        "__closure__",
        "__code__",
        "__globals__",
        "__mro__",
        "__subclasses__",
        "__traceback__",
        "ag_frame",
        "cr_frame",
        "f_back",
        "f_builtins",
        "f_globals",
        "f_locals",
        "gi_frame",
        "mro",
        "tb_frame",
        "tb_next",
        "modules",
        "_getframe",
    ]
)


def objections(changed: Mapping[str, bytes], pristine: Mapping[str, bytes]) -> list[str]:
    """What the changed files use and the pristine package does not, in words; empty if there is nothing to object to.

    A file that is no Python has no objection: its tests will say so.
    """
    known: set[str] = set()
    for content in pristine.values():
        known |= _uses(content)
    found = {name: sorted(_uses(content) - known) for name, content in sorted(changed.items())}
    return [f"{name} uses {', '.join(uses)}" for name, uses in found.items() if uses]


def _uses(content: bytes) -> set[str]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    uses: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses |= {f"module {alias.name.partition('.')[0]}" for alias in node.names if alias.name.partition(".")[0] in _MODULES}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module and node.module.partition(".")[0] in _MODULES:
            uses.add(f"module {node.module.partition('.')[0]}")
        elif isinstance(node, ast.Name) and node.id in _NAMES:
            uses.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            uses.add(f"attribute {node.attr}")
    return uses
