"""The whole job as a user runs it, in small: real sandboxes, a real server, and nothing left, also after a Ctrl-C and a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from examples.rollouts.fix import edits_between
from examples.rollouts.policies.tamperer import TAMPERINGS
from examples.rollouts.task import CACHETOOLS

PROJECT = Path(__file__).resolve().parents[2]
STATE = PROJECT / "build" / "test-cache" / "rollouts"

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(400)]


async def _start(*arguments: str, endpoint: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "examples.rollouts", "--state", str(STATE), "--json", *arguments],
        cwd=PROJECT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "DSEC_"))} | (endpoint or {}),
    )


async def _run(*arguments: str, endpoint: dict[str, str] | None = None) -> tuple[int | None, dict[str, Any]]:
    process = await _start(*arguments, endpoint=endpoint)
    output, errors = await process.communicate()
    try:
        return process.returncode, json.loads(output)
    except ValueError:
        pytest.fail(f"exit code {process.returncode}\n{errors.decode()[-3000:]}")


async def _until_said(process: asyncio.subprocess.Process, words: str) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(300):
        async for line in process.stderr:
            if words in line.decode():
                return
    pytest.fail(f"it never said {words!r}")


async def test_only_the_work_is_paid_and_nothing_is_left() -> None:
    code, document = await _run("--rollouts", "8")
    assert document["problem"] is None
    assert (document["objections"], document["left"]) == ([], [])
    assert {policy: (row["rollouts"], row["failed"], row["reward"]) for policy, row in document["policies"].items()} == {
        "oracle": (2, 0, 1.0),
        "idle": (2, 0, 0.0),
        "wrong": (2, 0, 0.0),
        "tamperer": (2, 0, 0.0),
    }
    assert (document["fail_to_pass"], document["pass_to_pass"]) == (8, 283)
    assert code == 0


async def test_every_way_of_tampering_earns_nothing() -> None:
    code, document = await _run("--policy", "tamperer", "--rollouts", str(len(TAMPERINGS)))
    assert {each["variant"]: each["reward"] for each in document["rollouts"]} == {each.name: 0.0 for each in TAMPERINGS}
    assert all(each["reason"] for each in document["rollouts"])
    assert (code, document["left"]) == (0, [])


async def test_a_model_behind_an_endpoint_is_paid_for_its_fix() -> None:
    """The endpoint's model knows the fix: it edits through tool calls, then stops."""

    async def complete(request: web.Request) -> web.Response:
        asked = await request.json()
        edits = await asyncio.to_thread(_real_fix)
        calls = [
            {"id": str(number), "type": "function", "function": {"name": "edit", "arguments": json.dumps(arguments)}}
            for number, arguments in enumerate(edits)
        ]
        done = asked["messages"][-1]["role"] == "tool"
        message = {"role": "assistant", "content": "Done.", **({} if done else {"tool_calls": calls})}
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        code, document = await _run("--policy", "openai", "--rollouts", "2", endpoint={"OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"})
    finally:
        await runner.cleanup()
    assert [(each["variant"], each["reward"]) for each in document["rollouts"]] == [("m", 1.0), ("m", 1.0)]
    assert (code, document["left"]) == (0, [])


def _real_fix() -> list[dict[str, str]]:
    old, new = (STATE / "sources" / release.folder / CACHETOOLS.package for release in (CACHETOOLS.old, CACHETOOLS.new))
    return [{"path": f"{CACHETOOLS.package_path}/{edit.path}", "old": edit.old, "new": edit.new} for edit in edits_between(old, new)]


async def test_a_signal_in_the_middle_leaves_nothing() -> None:
    process = await _start("--rollouts", "8")
    await _until_said(process, "create, act, verify")
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    document = json.loads(output)
    assert (process.returncode, document["problem"], document["left"]) == (130, "interrupted", [])


async def test_a_job_that_was_killed_is_cleaned_up_by_the_next() -> None:
    process = await _start("--rollouts", "8")
    await _until_said(process, "create, act, verify")
    process.kill()
    await process.communicate()
    run = Path((STATE / "run-folder").read_text())
    assert (run / "dsec.sock").exists()
    code, document = await _run("--rollouts", "4")
    assert (code, document["left"]) == (0, [])
    assert run.name not in os.listdir(run.parent)
