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

from typing import Any

import libdsec
from libdsec import client, files, ports, process, sandbox, session, stream
from libdsec.twin import twin_of

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

DSecClient: Any = twin_of(client.DSecClient, __name__)
Files: Any = twin_of(files.Files, __name__)
PortHttp: Any = twin_of(ports.PortHttp, __name__)
Process: Any = twin_of(process.Process, __name__)
ProcessStream: Any = twin_of(stream.ProcessStream, __name__)
Sandbox: Any = twin_of(sandbox.Sandbox, __name__)
Session: Any = twin_of(session.Session, __name__)
TcpConnection: Any = twin_of(ports.TcpConnection, __name__)


def __getattr__(name: str) -> Any:
    # Arguments, results and errors are the same on both sides.
    if name in libdsec.__all__:
        return getattr(libdsec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
