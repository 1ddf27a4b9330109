"""A base from Debian's own packages, from the mirrors that this machine's apt is set up with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsec.environments.tools import ToolOutput, run_tool, tool_output
from libdsec.errors import InvalidArgument, NotFound

__all__ = ["Mirror", "bootstrapped", "check_packages", "check_suite", "choose_mirrors", "configured_mirrors"]

_SUITE = re.compile(r"[a-z][a-z0-9.-]{1,40}")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?(?:=[A-Za-z0-9.+:~-]+)?(?:/[a-z0-9-]+)?")
_FORMAT = "$(REPO_URI) $(RELEASE) $(COMPONENT)"


@dataclass(frozen=True, slots=True)
class Mirror:
    """One line of apt's sources: where, which suite, which components."""

    uri: str
    suite: str
    components: tuple[str, ...]

    @property
    def line(self) -> str:
        """As sources.list has it."""
        return f"deb {self.uri} {self.suite} {' '.join(self.components)}"


def check_suite(suite: str) -> None:
    """InvalidArgument if it cannot be a suite's name."""
    if not _SUITE.fullmatch(suite):
        raise InvalidArgument(f"source: {suite!r:.100} is no Debian suite", field="source")


def check_packages(packages: Sequence[str]) -> None:
    """InvalidArgument naming the first that cannot be a package's name."""
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise InvalidArgument(f"include: {package!r:.100} is no package name", field="include")


def configured_mirrors() -> list[Mirror]:
    """What this machine's apt reads, in its order; apt itself parses its files."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in run_tool(["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"]).decode().splitlines():
        uri, suite, component = line.split()
        components = found.setdefault((uri, suite), [])
        if component not in components:
            components.append(component)
    return [Mirror(uri, suite, tuple(components)) for (uri, suite), components in found.items()]


def choose_mirrors(configured: Sequence[Mirror], suite: str) -> list[Mirror]:
    """Those of the suite with its updates and security; for another suite than the machine's, its main archive in the same place."""
    own = [mirror for mirror in configured if mirror.suite == suite or mirror.suite.startswith((f"{suite}-", f"{suite}/"))]
    if any(mirror.suite == suite for mirror in own):
        return own
    main = next((mirror for mirror in configured if "-" not in mirror.suite and "/" not in mirror.suite), None)
    if main is None:
        raise NotFound("source: this machine's apt has no Debian archive to take the suite from", field="source")
    return [Mirror(main.uri, suite, ("main",))]


@contextlib.contextmanager
def bootstrapped(mirrors: Sequence[Mirror], suite: str, packages: Sequence[str], work: Path) -> Iterator[ToolOutput]:
    """A minimal system with `packages`, as the tar stream that mmdebstrap writes.

    It runs in mount and pid namespaces of its own: what it mounts and starts ends with it, also when it is killed. Where mounts are
    shared, what is unmounted outside meanwhile goes inside too, so that a build pins nobody's disk.
    """
    temporary = work / "bootstrap"
    temporary.mkdir()
    with tool_output(
        [
            "unshare", "--mount", "--propagation=slave", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--",
            "mmdebstrap", "--mode=root", "--format=tar", "--variant=minbase",
            "--dpkgopt=force-unsafe-io", "--aptopt=Acquire::Languages none",
            *([f"--include={','.join(packages)}"] if packages else []),
            suite, "-", *(mirror.line for mirror in mirrors),
        ],
        name="mmdebstrap",
        environment={"TMPDIR": str(temporary)},
        work=work,
    ) as output:  # fmt: skip
        yield output
