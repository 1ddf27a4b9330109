"""A shell session's handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libdsec.api import Api, new_op_id, segment
from libdsec.errors import NotFound, SandboxFailed
from libdsec.schema import DEFAULT_OUTPUT_LIMIT_BYTES, ExecResult, SessionInfo, SessionRunRequest
from libdsec.shielding import finish

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Session"]


class Session:
    """A shell that keeps its directory, variables and functions from one command to the next. `async with` closes it."""

    session_id: str

    def __init__(self, api: Api, sandbox_path: str, info: SessionInfo) -> None:
        self._api = api
        self._sandbox_path = sandbox_path
        self._path = f"{sandbox_path}/sessions/{segment(info.session_id)}"
        self.session_id = info.session_id

    def __repr__(self) -> str:
        return f"<Session {self.session_id}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await finish(self.close())

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        kill_grace: float = 2.0,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
        op_id: str | None = None,
    ) -> ExecResult:
        """Run text in the shell and wait. Commands of one session run one after another. As Sandbox.run_shell() otherwise."""
        op_id = op_id or new_op_id()
        request = SessionRunRequest(
            shell=command, timeout=timeout, kill_grace=kill_grace, output_limit_bytes=output_limit_bytes, op_id=op_id
        )
        # No limit of our own: commands before this one may take their time first.
        return await self._api.run(self._path + "/run", self._sandbox_path, request, op_id, None)

    async def close(self) -> None:
        """End the shell and all that runs in it. Closing again, or with the sandbox gone, is no error."""
        try:
            await self._api.call("DELETE", self._path, type(None), idempotent=True)
        except (NotFound, SandboxFailed):
            return
