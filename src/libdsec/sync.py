"""The blocking twin of the SDK: the same names, the same arguments, no `await`.

    from libdsec.sync import DSecClient, DSecContainerRunArgs

    with DSecClient() as client:
        with client.run_container(DSecContainerRunArgs(container_image="debian")) as sandbox:
            print(sandbox.run_shell("echo hi").stdout_text)

Each class here is made from its async original: `async def` methods block, async iteration is plain iteration, `async with` is `with`.
Where an argument may be an async iterator, an iterator will do. Usable from any thread and in Jupyter; Ctrl-C cancels what is being
waited for, and its clean-up is done. For many sandboxes at once use the async SDK.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import libdsec
from libdsec import client, files, ports, process, sandbox, session, stream
from libdsec.portal import portal

__all__ = [
    "DSecClient",
    "Files",
    "PortHttp",
    "Process",
    "ProcessStream",
    "Sandbox",
    "Session",
    "TcpConnection",
    *(name for name in libdsec.__all__ if name not in ("DSecClient", "Sandbox")),
]

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
    """What the async SDK gets for what a caller gave: generators as async ones."""
    return _stepped(value) if inspect.isgenerator(value) else value


async def _stepped(iterator: Iterator[Any]) -> AsyncIterator[Any]:
    end = object()
    while (item := await asyncio.to_thread(next, iterator, end)) is not end:
        yield item


def _twin_of(original: type) -> type:
    """The blocking class of an async one."""
    members: dict[str, Any] = {"__doc__": original.__doc__, "__module__": __name__, "__getattr__": _get_attribute, "__repr__": _repr}
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
    return type(original.__name__, (), members)


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


for _original in (
    client.DSecClient,
    files.Files,
    ports.PortHttp,
    ports.TcpConnection,
    process.Process,
    sandbox.Sandbox,
    session.Session,
    stream.ProcessStream,
):
    _TWINS[_original] = _twin_of(_original)

DSecClient: Any = _TWINS[client.DSecClient]
Files: Any = _TWINS[files.Files]
PortHttp: Any = _TWINS[ports.PortHttp]
Process: Any = _TWINS[process.Process]
ProcessStream: Any = _TWINS[stream.ProcessStream]
Sandbox: Any = _TWINS[sandbox.Sandbox]
Session: Any = _TWINS[session.Session]
TcpConnection: Any = _TWINS[ports.TcpConnection]


def __getattr__(name: str) -> Any:
    # Arguments, results and errors are the same on both sides.
    if name in libdsec.__all__:
        return getattr(libdsec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
