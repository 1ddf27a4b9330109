"""All benchmarks, one after another: `python -m benchmarks [NAME...] [--quick]`. Writes build/bench/NAME.json and prints the tables.

Each runs in a process of its own, so that none inherits another's memory or connections. The exit status says whether all ran to their end,
not whether budgets were met: that is in the tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import BENCH, print_document

__all__ = ["main"]

ALL: dict[str, tuple[list[str], list[str]]] = {
    "create": (["-n", "1000", "-c", "16"], ["-n", "100", "--peer-n", "10", "--rounds", "2"]),
    "exec": (["-n", "2000", "--live", "500"], ["-n", "200", "--live", "50", "--peer-n", "10", "--rounds", "2"]),
    "streams": (["--rounds", "3"], ["--size-mb", "128", "--rounds", "1"]),
    "density": (["-n", "1600"], ["-n", "200", "--exec-n", "100"]),
    "cycles": (["-n", "1000", "--kill-edge"], ["-n", "100", "--kill-edge"]),
    "fork": ([], ["--quick"]),
    "layers": ([], ["--quick"]),
    "build": (["--images", "3", "--quick"], ["--images", "2", "--rounds", "1", "--quick"]),
    "ondemand": (["--images", "3", "--sandboxes", "30", "--quick"], ["--images", "2", "--sandboxes", "12", "--rounds", "1", "--quick"]),
}
"""Name to the options of an ordinary and of a quick run. Those whose full size is gigabytes from the registries are small in both: ask for
them by their own command."""


def _run(name: str, options: list[str]) -> Path | None:
    target = BENCH / f"{name}.json"
    argv = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json"]
    print(f"== {name} {' '.join(options)}", file=sys.stderr, flush=True)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parent.parent, check=False)
    if done.returncode != 0:
        print(f"{name} ended with {done.returncode}", file=sys.stderr)
        return None
    partial = target.with_suffix(".partial")
    partial.write_bytes(done.stdout)
    partial.rename(target)
    return target


def main() -> int:
    """Run those asked for; 1 if one did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}; all if none is given")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work, rather than how fast")
    parser.add_argument("--wait-quiet", default="30", help="seconds to wait, at most, before a round while others use the CPUs")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ALL):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}: {', '.join(ALL)}")
    BENCH.mkdir(parents=True, exist_ok=True)
    written = [_run(name, [*ALL[name][options.quick], "--wait-quiet", options.wait_quiet]) for name in options.names or ALL]
    for file in filter(None, written):
        print_document(json.loads(file.read_text()))
    return 0 if all(written) else 1


if __name__ == "__main__":
    sys.exit(main())
