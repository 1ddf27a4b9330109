"""A policy that asks a language model: any endpoint that speaks OpenAI's chat completions with tool calls.

It is there when `OPENAI_BASE_URL` and `OPENAI_MODEL` are set (`OPENAI_API_KEY` too where the endpoint wants one). The key stays in this
process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..agent import Agent, ToolFailed
from ..task import Task

__all__ = ["EndpointFailed", "OpenAIPolicy"]

_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})


class EndpointFailed(Exception):
    """The endpoint gave no usable answer. A failed trajectory, not a policy that earned nothing."""


def _tool(name: str, description: str, required: tuple[str, ...], **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("read", "Read lines of a text file; start is 1 for the first line.", ("path",), path="string", start="integer", lines="integer"),
    _tool(
        "search", "Lines matching a Python regular expression in a file or below a folder.", ("pattern",), pattern="string", path="string"
    ),
    _tool(
        "edit",
        "Replace the text `old`, which must occur exactly once in the file, by `new`. An empty `old` makes a new file.",
        ("path", "old", "new"),
        path="string",
        old="string",
        new="string",
    ),
    _tool("run", "Run a shell command; gives exit code and output.", ("command",), command="string", cwd="string", timeout="number"),
]
_NAMES = frozenset(tool["function"]["name"] for tool in TOOLS)

_SYSTEM = "You are a software engineer at work in a sandbox. Use the tools, check your work, then answer without a tool call."


@dataclass(frozen=True, slots=True)
class OpenAIPolicy:
    """An endpoint and a model. `attempts` counts tries of one request; waits grow from `backoff_seconds`."""

    base_url: str
    model: str
    api_key: str = ""
    max_turns: int = 40
    request_seconds: float = 300.0
    attempts: int = 4
    backoff_seconds: float = 1.0

    def __repr__(self) -> str:
        return f"OpenAIPolicy({self.base_url!r}, {self.model!r})"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> OpenAIPolicy | None:
        """None where it is not configured."""
        base_url, model = environment.get("OPENAI_BASE_URL", ""), environment.get("OPENAI_MODEL", "")
        return cls(base_url.rstrip("/"), model, environment.get("OPENAI_API_KEY", "")) if base_url and model else None

    async def act(self, agent: Agent, task: Task) -> None:
        """Ask, do what is asked for, ask again, until the model calls no tool or the turns are used up. Raises `EndpointFailed`."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task.statement}]
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self.request_seconds)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for _ in range(self.max_turns):
                message = await self._complete(session, messages)
                calls = message.get("tool_calls") or []
                if not calls:
                    return
                messages.append({"role": "assistant", "content": message.get("content"), "tool_calls": calls})
                for call in calls:
                    content = await _perform(agent, call)
                    messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": content})

    async def _complete(self, session: aiohttp.ClientSession, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "tools": TOOLS, "tool_choice": "auto"}
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(self.backoff_seconds * 2 ** (attempt - 1))
            try:
                async with session.post(f"{self.base_url}/chat/completions", json=body) as response:
                    text = await response.text()
                    if response.status == 200:
                        return _message(text)
                    problem = f"HTTP {response.status}: {text[:300]}"
                    if response.status not in _RETRIED:
                        break
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise EndpointFailed(f"{self.model}: {problem}")


def _message(text: str) -> dict[str, Any]:
    try:
        message = json.loads(text)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError):
        raise EndpointFailed(f"not a chat completion: {text[:300]}") from None
    if not isinstance(message, dict):
        raise EndpointFailed(f"not a chat completion: {text[:300]}")
    return message


async def _perform(agent: Agent, call: dict[str, Any]) -> str:
    """A tool call's result as text; a model's own mistakes are told to it."""
    function = call.get("function") or {}
    name = function.get("name")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        return "error: the arguments are not JSON"
    if name not in _NAMES or not isinstance(arguments, dict):
        return f"error: no tool {name!r}; there are {', '.join(sorted(_NAMES))}"
    try:
        return json.dumps(await agent.call(str(name), **arguments))
    except ToolFailed as error:
        return f"error: {error}"
