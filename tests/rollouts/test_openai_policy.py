"""The policy that asks an endpoint, against a small server that speaks the protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from examples.rollouts.agent import Agent
from examples.rollouts.policies.openai import EndpointFailed, OpenAIPolicy
from examples.rollouts.task import Task


class Endpoint:
    """Answers with what the test put in `answers`, in order: an assistant's message, or a status to fail with."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | int | str] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.Response(status=answer, text="try later")
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response({"choices": [{"message": answer, "finish_reason": "stop"}]})


def _calls(*calls: tuple[str, dict[str, Any] | str]) -> dict[str, Any]:
    made = [
        {"id": f"call-{n}", "type": "function", "function": {"name": name, "arguments": a if isinstance(a, str) else json.dumps(a)}}
        for n, (name, a) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def _text(file: str) -> str:
    return Path(file).read_text()


DONE = {"role": "assistant", "content": "Done."}


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    served = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.complete)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    served.url = f"http://{host}:{port}/v1"
    yield served
    await runner.cleanup()


def _policy(endpoint: Endpoint, **changes: Any) -> OpenAIPolicy:
    return OpenAIPolicy(endpoint.url, "model-1", "secret-key", backoff_seconds=0.01, **changes)


async def test_a_model_fixes_the_bug_by_calling_tools(endpoint: Endpoint, agent: Agent, task: Task, project_texts: dict[str, str]) -> None:
    file = f"{task.package_path}/__init__.py"
    endpoint.answers = [
        _calls(("search", {"pattern": "def add", "path": task.package_path}), ("read", {"path": file})),
        _calls(("edit", {"path": file, "old": "a - b", "new": "a + b"})),
        DONE,
    ]
    await _policy(endpoint).act(agent, task)
    assert _text(file) == project_texts["fixed"]
    assert [step.tool for step in agent.steps] == ["search", "read", "edit"]
    first, second, _ = endpoint.requests
    assert (first["model"], first["messages"][1]["content"]) == ("model-1", task.statement)
    assert {tool["function"]["name"] for tool in first["tools"]} == {"read", "search", "edit", "run"}
    answers = [message for message in second["messages"] if message["role"] == "tool"]
    assert [answer["tool_call_id"] for answer in answers] == ["call-0", "call-1"]
    assert "def add" in answers[1]["content"]
    assert endpoint.keys == ["Bearer secret-key"] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("edit", {"path": "/nonexistent", "old": "a", "new": "b"}), "error: /nonexistent is not a file"),
        (("fly", {}), "error: no tool 'fly'"),
        (("run", "{not json"), "error: the arguments are not JSON"),
        (("run", "[]"), "error: no tool 'run'"),
        (("run", {"commando": "x"}), "error: bad request"),
        (("run", {"tool": "x", "command": "true"}), "error: bad request"),
    ],
)
async def test_a_models_mistakes_are_told_to_it(endpoint: Endpoint, agent: Agent, task: Task, call: tuple[str, Any], words: str) -> None:
    endpoint.answers = [_calls(call), DONE]
    await _policy(endpoint).act(agent, task)
    assert words in endpoint.requests[1]["messages"][-1]["content"]


async def test_a_busy_endpoint_is_asked_again(endpoint: Endpoint, agent: Agent, task: Task) -> None:
    endpoint.answers = [429, 503, DONE]
    await _policy(endpoint).act(agent, task)
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("answers", "words", "asked"),
    [
        ([500] * 4, "HTTP 500: try later", 4),
        ([401], "HTTP 401", 1),
        (["<html>"], "not a chat completion", 1),
        (['{"choices": []}'], "not a chat completion", 1),
        (['{"choices": [{"message": "hi"}]}'], "not a chat completion", 1),
    ],
)
async def test_an_endpoint_that_fails_fails_the_trajectory(
    endpoint: Endpoint, agent: Agent, task: Task, answers: list[Any], words: str, asked: int
) -> None:
    endpoint.answers = list(answers)
    with pytest.raises(EndpointFailed, match=words):
        await _policy(endpoint).act(agent, task)
    assert len(endpoint.requests) == asked


async def test_an_endpoint_that_is_not_there_fails_the_trajectory(agent: Agent, task: Task) -> None:
    policy = OpenAIPolicy("http://127.0.0.1:9/v1", "m", attempts=2, backoff_seconds=0.01)
    with pytest.raises(EndpointFailed, match="Cannot connect"):
        await policy.act(agent, task)


async def test_a_model_that_never_stops_is_stopped(endpoint: Endpoint, agent: Agent, task: Task) -> None:
    endpoint.answers = [_calls(("run", {"command": "true"}))] * 3
    await _policy(endpoint, max_turns=3).act(agent, task)
    assert len(endpoint.requests) == 3


def test_the_key_is_not_in_the_policys_text() -> None:
    assert "secret-key" not in repr(OpenAIPolicy("http://x", "m", "secret-key"))
