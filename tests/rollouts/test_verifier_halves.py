"""The verifier's two halves as real processes: what tested code can do to its own report."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
from pathlib import Path

import pytest

from examples.rollouts.canaries import draw
from examples.rollouts.policies import tamperer
from examples.rollouts.verdict import Expectation, Report, judge, parse

VERIFIER = Path(__file__).resolve().parents[2] / "examples" / "rollouts" / "verifier"
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
EXPECTATION = Expectation(
    frozenset({"tests.test_sums.SumsTest.test_add"}),
    frozenset({"tests.test_sums.SumsTest.test_double"}),
    frozenset({"tests.test_sums.SumsTest.test_none"}),
)

pytestmark = pytest.mark.slow


async def _report(public: Path, source: str, tests: str, seconds: float = 20) -> Report:
    for name in ("supervisor.py", "child.py"):
        shutil.copyfile(VERIFIER / name, public / name)
    for file, text in {"src/sums/__init__.py": source, "release/tests/__init__.py": "", "release/tests/test_sums.py": tests}.items():
        (public / file).parent.mkdir(parents=True, exist_ok=True)
        (public / file).write_text(text)
    canaries = draw()
    nonce, token = secrets.token_hex(16), secrets.token_hex(16)
    plan = {
        "nonce": nonce,
        "token": token,
        "files": {f"{name}.py": text for name, text in canaries.modules.items()},
        "path": [str(public / "release"), str(public / "src")],
        "modules": canaries.among(["tests.test_sums"]),
        "seconds": seconds,
    }
    process = await asyncio.create_subprocess_exec(
        *[PYTHON, "-I", "-S", "-B", str(public / "supervisor.py")], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate(json.dumps(plan).encode())
    return parse(printed, process.returncode, nonce=nonce, token=token, canaries=canaries.expected)


async def test_the_right_source_earns(public: Path, project_texts: dict[str, str]) -> None:
    report = await _report(public, project_texts["fixed"], project_texts["tests"])
    assert report.faults == ()
    assert report.outcomes == {
        "tests.test_sums.SumsTest.test_add": "passed",
        "tests.test_sums.SumsTest.test_double": "passed",
        "tests.test_sums.SumsTest.test_none": "skipped",
    }
    assert judge(report, EXPECTATION).reward == 1.0


async def test_the_broken_source_earns_nothing(public: Path, project_texts: dict[str, str]) -> None:
    report = await _report(public, project_texts["broken"], project_texts["tests"])
    assert report.faults == ()
    assert judge(report, EXPECTATION).reason == "1 of 1 tests of the fix do not pass"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (tamperer._PATCH, "the test framework was tampered with"),
        (tamperer._EXIT, "no true end mark"),
        (tamperer._FORGE, "the test framework was tampered with"),
        ("raise SystemExit(0)", "no true end mark"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "did not exit cleanly (status -9)"),
        ("import unittest; unittest.TestCase.assertEqual = lambda *a: None", "the test framework was tampered with"),
        ("import unittest; unittest.TestCase.skipTest = lambda *a: None", "the test framework was tampered with"),
        (
            "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'{\"reward\": 1}\\n')\n    except OSError: pass",
            "not the test runner's",
        ),
        ('print(\'{"nonce": ""}\', flush=True)', "1 of 1 tests of the fix do not pass"),
        ("import nothing_of_that_name", "tests of the fix do not pass"),
    ],
)
async def test_source_that_tampers_earns_nothing(public: Path, project_texts: dict[str, str], code: str, reason: str) -> None:
    report = await _report(public, project_texts["broken"] + "\n" + code, project_texts["tests"])
    verdict = judge(report, EXPECTATION)
    assert verdict.reward == 0.0
    assert reason in verdict.reason


async def test_source_that_never_ends_is_killed_at_the_deadline(public: Path, project_texts: dict[str, str]) -> None:
    report = await _report(public, "import time\ntime.sleep(600)\n", project_texts["tests"], seconds=0.5)
    assert "the tests did not end in time" in report.faults


async def test_a_report_without_end_is_cut(public: Path, project_texts: dict[str, str]) -> None:
    flood = "import os\nwhile True:\n    for fd in range(3, 10):\n        try: os.write(fd, b'x' * 65536)\n        except OSError: pass\n"
    report = await _report(public, flood, project_texts["tests"])
    assert "the report is too long" in report.faults


async def test_a_grandchild_that_holds_the_report_open_does_not_delay_it(public: Path, project_texts: dict[str, str]) -> None:
    fork = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n"
    async with asyncio.timeout(15):
        report = await _report(public, project_texts["fixed"] + fork, project_texts["tests"])
    assert judge(report, EXPECTATION).reward == 1.0


@pytest.mark.root
async def test_tested_code_is_another_user_and_cannot_touch_tests_source_or_supervisor(public: Path, project_texts: dict[str, str]) -> None:
    code = f"""
import os
assert os.getuid() == os.geteuid() == 65534 and os.getgroups() in ([], [65534]), (os.getuid(), os.getgroups())
for path in ({str(public / "release/tests/test_sums.py")!r}, {str(public / "src/sums/__init__.py")!r}, {str(public / "child.py")!r}):
    try:
        open(path, "a")
    except PermissionError:
        continue
    raise RuntimeError(path + " can be written")
for name in ("mem", "fd", "environ"):
    try:
        os.listdir(f"/proc/{{os.getppid()}}/fd") if name == "fd" else open(f"/proc/{{os.getppid()}}/{{name}}", "rb").read(1)
    except PermissionError:
        continue
    raise RuntimeError(name + " of the supervisor can be read")
try:
    os.kill(os.getppid(), 9)
except PermissionError:
    pass
assert sorted(os.environ) in (["HOME", "LC_ALL", "PATH"], ["HOME", "LC_ALL", "LC_CTYPE", "PATH"]), sorted(os.environ)
"""
    assert os.geteuid() == 0
    report = await _report(public, project_texts["fixed"] + code, project_texts["tests"])
    assert report.log == ""
    assert report.other_user
    assert judge(report, EXPECTATION).reward == 1.0
