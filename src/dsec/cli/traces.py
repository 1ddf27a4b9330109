"""`dsec env trace`: what was read of an environment, recorded and read ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, from_store, run_folder, state_folder, store_root
from dsec.cli.output import amount, print_json, tell
from libdsec.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from dsec.environments.apart import Told

__all__ = ["register"]


class _Told(msgspec.Struct, kw_only=True):
    """What `--json` prints."""

    layer: str
    reads: int
    bytes: int
    of_bytes: int
    replayed_bytes: int | None = None


def _trace(
    name: Annotated[str, typer.Argument(help="Environment.")],
    record: Annotated[bool, typer.Option("--record", help="Keep in the store what was read of it on this node.")] = False,
    replay: Annotated[bool, typer.Option("--replay", help="Read ahead what the recorded trace says, now.")] = False,
    as_json: JsonOption = False,
    state: StateOption = state_folder,
    run: RunOption = run_folder,
    store: StoreOption = None,
) -> None:
    """Show, record or replay what sandboxes read of an environment.

    A recorded trace is replayed by nodes that mount the environment for the first time.
    """
    from dsec.environments import EnvironmentStore
    from dsec.environments.traces import load_trace, record_trace, replay_trace, save_trace

    def work(_: Told) -> _Told:
        if record and replay:
            raise InvalidArgument("--record and --replay exclude each other", field="--record")
        environments = EnvironmentStore(state, run, store)
        resolved = environments.resolve([name], field="name")
        digest = resolved.digests[-1]
        if record:
            trace = record_trace(environments.layers, environments.access, digest)
            save_trace(environments.layers, trace)
        elif (found := load_trace(environments.layers, digest)) is not None:
            trace = found
        else:
            raise NotFound(f"nothing was recorded of {name}; use it, then `dsec env trace {name} --record`", field="name")
        whole = sum(use.size for each in resolved.digests for use in environments.layers.manifest(each).identity.packs)
        told = _Told(layer=digest, reads=len(trace.reads), bytes=trace.bytes, of_bytes=whole)
        if replay:
            told.replayed_bytes = replay_trace(environments.access, trace)
        return told

    told = from_store(work, as_json=as_json, root=store_root(state, store), long_calls=replay)
    if as_json:
        print_json(told)
        return
    verb = "recorded" if record else "in the trace"
    share = f", {100 * told.bytes / told.of_bytes:.1f} % of its packs" if told.of_bytes else ""
    tell(f"{told.reads} reads {verb}, {amount(told.bytes)}{share}")
    if told.replayed_bytes is not None:
        tell(f"{amount(told.replayed_bytes)} read")


def register(environments: typer.Typer) -> None:
    """Add `trace` to `dsec env`."""
    environments.command("trace")(_trace)
