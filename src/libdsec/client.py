"""The client: the door to a server, and what makes and finds sandboxes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from libdsec.api import Api, segment
from libdsec.packs import ask_pack
from libdsec.sandbox import Sandbox, check_count, make
from libdsec.schema import (
    BackendName,
    ContainerRunArgs,
    CreateRequest,
    EnvironmentInfo,
    NodeInfo,
    PackInfo,
    SandboxInfo,
    SandboxState,
)
from libdsec.shielding import finish
from libdsec.timeouts import Timeouts
from libdsec.transport import Transport, open_transport

__all__ = ["DEFAULT_URL", "DSecClient"]

DEFAULT_URL = "unix:///run/dsec/dsec.sock"


class DSecClient:
    """A connection to a DSec server. Use `async with`, or open() and aclose().

    `url` is `unix:///path` or `http://host:port`, by default that of the environment's DSEC_URL, else this machine's own socket; `token`
    is for TCP, by default DSEC_TOKEN. Sandboxes outlive the client: stop them, or use them by `async with`.
    """

    url: str
    timeouts: Timeouts

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeouts: Timeouts | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.url = url or os.environ.get("DSEC_URL") or DEFAULT_URL
        self.timeouts = timeouts or Timeouts()
        self._transport = transport or open_transport(self.url, token or os.environ.get("DSEC_TOKEN"), self.timeouts)
        self._api = Api(self._transport, self.timeouts)

    async def open(self) -> DSecClient:
        """Check that the server answers and takes our token.

        ConnectionFailed at once where it does not: only a server once seen is waited for.
        """
        await self._api.once("GET", "/v1/node", NodeInfo, timeout=self.timeouts.connect + self.timeouts.request)
        return self

    async def aclose(self) -> None:
        """Close the connections. Sandboxes stay."""
        await self._transport.aclose()

    async def __aenter__(self) -> DSecClient:
        try:
            return await self.open()
        except BaseException:
            await finish(self.aclose())
            raise

    async def __aexit__(self, *exc: object) -> None:
        await finish(self.aclose())

    async def run_container(self, args: ContainerRunArgs, *, timeout: float | None = None) -> Sandbox:
        """Make a container sandbox, ready for commands. After an error, a timeout or a cancellation nothing of it stays."""
        return await self.run(args, backend="container", timeout=timeout)

    async def run_microvm(self, args: ContainerRunArgs, *, timeout: float | None = None) -> Sandbox:
        """Make a microVM sandbox. Unsupported where the server has no such backend."""
        return await self.run(args, backend="microvm", timeout=timeout)

    async def run_fullvm(self, args: ContainerRunArgs, *, timeout: float | None = None) -> Sandbox:
        """Make a full virtual machine. Unsupported where the server has no such backend."""
        return await self.run(args, backend="fullvm", timeout=timeout)

    async def run_fncall(self, args: ContainerRunArgs, *, timeout: float | None = None) -> Sandbox:
        """Take a warm FnCall sandbox. Unsupported where the server has no such backend."""
        return await self.run(args, backend="fncall", timeout=timeout)

    async def run(self, args: ContainerRunArgs, *, backend: BackendName = "container", timeout: float | None = None) -> Sandbox:
        """Make a sandbox on the backend named."""
        return (await self.run_many(args, count=1, backend=backend, timeout=timeout))[0]

    async def run_many(
        self,
        args: ContainerRunArgs,
        *,
        count: int,
        backend: BackendName = "container",
        timeout: float | None = None,
        allow_partial: bool = False,
    ) -> list[Sandbox]:
        """Make `count` sandboxes alike in one request.

        Where some fail, those made are stopped and the first failure is raised, with `made` and `failed` in its details; with
        `allow_partial` those made are returned, and only a complete failure raises.
        """
        request = CreateRequest(args=args, backend=backend, count=check_count(count))
        return await make(
            self._api, "/v1/sandboxes", request, self.timeouts.create if timeout is None else timeout, allow_partial=allow_partial
        )

    async def restore(self, name: str, args: ContainerRunArgs | None = None, *, timeout: float | None = None) -> Sandbox:
        """Make a sandbox that begins with the files that pack_diff() published as `name`, `name:tag` or `name@digest`.

        Of `args` all counts but the environment.
        """
        wanted = msgspec.structs.replace(args or ContainerRunArgs(), container_image=name, environment=[])
        return await self.run(wanted, timeout=timeout)

    async def pack(self, op_id: str, *, wait: float = 0.0) -> PackInfo:
        """The record of a pack_diff() by its id, after up to `wait` seconds if it is under way. What it failed of is in its `error`."""
        return await ask_pack(self._api, op_id, wait)

    async def get(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox that exists. NotFound otherwise."""
        info = await self._api.call("GET", f"/v1/sandboxes/{segment(sandbox_id)}", SandboxInfo, idempotent=True)
        return Sandbox(self._api, info)

    async def node(self) -> NodeInfo:
        """What the server's node is and can do."""
        return await self._api.call("GET", "/v1/node", NodeInfo, idempotent=True)

    async def environments(self) -> list[EnvironmentInfo]:
        """The environments that sandboxes can be made from."""
        return await self._api.call("GET", "/v1/environments", list[EnvironmentInfo], idempotent=True)

    async def environment(self, name: str) -> EnvironmentInfo:
        """One environment by `name` or `name:tag`."""
        return await self._api.call("GET", f"/v1/environments/{segment(name)}", EnvironmentInfo, idempotent=True)

    async def remove_environment(self, name: str) -> None:
        """Remove it. Conflict while a live sandbox uses it."""
        await self._api.call("DELETE", f"/v1/environments/{segment(name)}", type(None))

    async def list(self, *, state: SandboxState | None = None, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """Sandboxes, newest knowledge of the server; by state and by labels that must all match."""
        query: dict[str, Any] = {"state": state, "label": [f"{key}={value}" for key, value in (labels or {}).items()]}
        return await self._api.call("GET", "/v1/sandboxes", list[SandboxInfo], query=query, idempotent=True)
