"""The verifier's half that imports the tested code: runs the test modules and reports each test's outcome on the descriptor given.

    {"token": ..., "id": "tests.test_lru.LRUCacheTest.test_lru", "outcome": "passed", "seconds": 0.01}   ...   {"token": ..., "end": 291}

Started as `python3 -I -S -B`: no site, no user's folder, no environment, no current folder. What it reports is a claim by a process that
the tested code lives in; supervisor.py and the verdict outside treat it so. Standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import unittest
from typing import Any


class Reporter(unittest.TestResult):
    """Reports once a test, when it stops: the worst of what its parts had."""

    def __init__(self, write: Any, token: str) -> None:
        super().__init__()
        self._write, self._token = write, token
        self._outcome = ""
        self._started = 0.0
        self.reported = 0

    def startTest(self, test: unittest.TestCase) -> None:
        self._outcome, self._started = "", time.monotonic()
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.report(test.id(), self._outcome or "none", time.monotonic() - self._started)

    def report(self, name: str, outcome: str, seconds: float) -> None:
        """Write one line."""
        self.reported += 1
        self._write({"token": self._token, "id": name, "outcome": outcome, "seconds": round(seconds, 4)})

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._outcome = self._outcome or "passed"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._outcome = self._outcome or "skipped"

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._outcome = self._outcome or "xfailed"

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._outcome = "xpassed"

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._outcome = "failed"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._outcome = "failed"

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        if isinstance(test, unittest.TestCase):
            self._outcome = "error"
        else:
            # A class's or module's set-up failed; its tests are never started.
            self.report(test.id(), "error", 0.0)


def main() -> None:
    """Run the plan once."""
    descriptor = int(sys.argv[1])
    plan = json.load(sys.stdin)
    os_write, dumps = os.write, json.dumps

    def write(record: dict[str, Any]) -> None:
        line = dumps(record).encode() + b"\n"
        while line:
            line = line[os_write(descriptor, line) :]

    # After the standard library, so that the tested code shadows none of it.
    sys.path += plan["path"]
    reporter = Reporter(write, plan["token"])
    modules = []
    # All before the first test runs: what the tested code does to the framework when it is imported holds for every test.
    for name in plan["modules"]:
        try:
            modules.append(importlib.import_module(name))
        except Exception as error:
            reporter.report(name, "error", 0.0)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    for module in modules:
        unittest.TestLoader().loadTestsFromModule(module).run(reporter)
    write({"token": plan["token"], "end": reporter.reported})


if __name__ == "__main__":
    main()
