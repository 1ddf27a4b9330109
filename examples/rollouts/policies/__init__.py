"""Policies: what decides on the next step. They live in the trainer's process and reach the sandbox through the harness alone.

A policy is a coroutine function of an agent and a task; it returns when it takes its work for done. It knows nothing of the verifier.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ..agent import Agent
from ..fix import Edit
from ..task import Task
from .openai import OpenAIPolicy
from .scripted import behaviour, idle, oracle, partial_fix
from .tamperer import TAMPERINGS

__all__ = ["Episode", "Policy", "available", "make"]


@dataclass(frozen=True, slots=True)
class Episode:
    """What a policy is made for. `fix` is the real one (for the oracle), `variant` counts the rollouts of this policy."""

    task: Task
    fix: tuple[Edit, ...]
    variant: int


Policy = Callable[[Agent], Awaitable[None]]

SCRIPTED = ("oracle", "idle", "wrong", "tamperer")


def available(environment: Mapping[str, str] | None = None) -> list[str]:
    """The scripted policies, and `openai` where an endpoint is configured."""
    found = OpenAIPolicy.from_environment(os.environ if environment is None else environment) is not None
    return [*SCRIPTED, "openai"] if found else list(SCRIPTED)


def make(name: str, episode: Episode, environment: Mapping[str, str] | None = None) -> tuple[Policy, str]:
    """The policy by name, and which variant of it this is, in words. Raises ValueError for a name that is not available."""
    task = episode.task
    if name == "oracle":
        return lambda agent: oracle(agent, task, episode.fix), ""
    if name == "idle":
        return lambda agent: idle(agent, task), ""
    if name == "wrong":
        overlooked = behaviour(episode.fix)[episode.variant % len(behaviour(episode.fix))]
        words = f"without hunk {episode.fix.index(overlooked) + 1} of {len(episode.fix)}"
        return lambda agent: partial_fix(agent, task, episode.fix, overlooked), words
    if name == "tamperer":
        tampering = TAMPERINGS[episode.variant % len(TAMPERINGS)]
        return lambda agent: tampering.act(agent, task), tampering.name
    endpoint = OpenAIPolicy.from_environment(os.environ if environment is None else environment)
    if name == "openai" and endpoint is not None:
        return lambda agent: endpoint.act(agent, task), endpoint.model
    raise ValueError(f"policy {name!r} is not available; there are {', '.join(available(environment))}")
