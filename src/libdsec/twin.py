"""How a blocking class is made from an async one."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from libdsec.portal import portal

__all__ = ["twin_of"]

_INNER = "_async"
_TWINS: dict[type, type] = {}


def _outwards(value: Any) -> Any:
    """What a caller gets for what the async SDK gave."""
    twin = _TWINS.get(type(value))
    if twin is not None:
        made: Any = object.__new__(twin)
        object.__setattr__(made, _INNER, value)
        return made
    if type(value) is list:
        return [_outwards(each) for each in value]
    return value


def _inwards(value: Any) -> Any:
    """What the async SDK gets for what a caller gave: iterators as async ones. An open file, which iterates over lines, stays one."""
    return _stepped(value) if isinstance(value, Iterator) and not hasattr(value, "read") else value


async def _stepped(iterator: Iterator[Any]) -> AsyncIterator[Any]:
    end = object()
    while (item := await asyncio.to_thread(next, iterator, end)) is not end:
        yield item


def twin_of(original: type, module: str) -> type:
    """The blocking class of an async one, as a class of `module`. Values of the async class that calls give become values of it."""
    members: dict[str, Any] = {"__doc__": original.__doc__, "__module__": module, "__getattr__": _get_attribute, "__repr__": _repr}
    for name, member in vars(original).items():
        if name == "__init__":
            members["__init__"] = _wrapped(member, functools.partial(_initialise, original))
        elif name in ("__aenter__", "__aexit__"):
            members[f"__{name[3:]}"] = _wrapped(member, _blocking(member))
        elif name == "__aiter__":
            members["__iter__"] = _wrapped(member, _iterating(member))
        elif name.startswith("_"):
            continue
        elif inspect.iscoroutinefunction(member):
            members[name] = _wrapped(member, _blocking(member))
        elif inspect.isasyncgenfunction(member):
            members[name] = _wrapped(member, _iterating(member))
        elif inspect.isfunction(member):
            members[name] = _wrapped(member, _plain(member))
        elif isinstance(member, property):
            members[name] = property(functools.partial(_get_attribute, name=name), doc=member.__doc__)
    made = _TWINS[original] = type(original.__name__, (), members)
    return made


def _wrapped(original: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return made(self, *args, **kwargs)

    functools.update_wrapper(method, original)
    # update_wrapper leaves a trace by which inspect would take this for the coroutine function that it wraps.
    del method.__wrapped__  # type: ignore[attr-defined]
    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return method


def _initialise(original: type, self: Any, *args: Any, **kwargs: Any) -> None:
    object.__setattr__(self, _INNER, original(*args, **kwargs))


def _blocking(member: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(self, _INNER)
        result = portal().run(member(inner, *map(_inwards, args), **{key: _inwards(value) for key, value in kwargs.items()}))
        return self if result is inner else _outwards(result)

    return call


def _iterating(member: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return portal().iterate(member(getattr(self, _INNER), *args, **kwargs))

    return call


def _plain(member: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _outwards(member(getattr(self, _INNER), *args, **kwargs))

    return call


def _get_attribute(self: Any, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return _outwards(getattr(object.__getattribute__(self, _INNER), name))


def _repr(self: Any) -> str:
    return repr(getattr(self, _INNER))
