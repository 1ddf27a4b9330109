"""`dsec store server`: what the server of packs of this node has done."""

from __future__ import annotations

import typer

from dsec.cli.options import JsonOption, RunOption, StateOption, StoreOption, run_folder, state_folder
from dsec.cli.output import amount, die, print_json, print_table, tell
from libdsec.errors import DSecError, NotFound

__all__ = ["register"]


def _server(as_json: JsonOption = False, state: StateOption = state_folder, run: RunOption = run_folder, store: StoreOption = None) -> None:
    """Tell what the server of packs of this node has read, kept and answered, by pack. A store on a local disk needs none."""
    from dsec.environments import EnvironmentStore

    access = EnvironmentStore(state, run, store).access
    try:
        try:
            status, reads = access.status(), access.reads()
        except OSError:
            raise NotFound("no server of packs runs on this node") from None
    except DSecError as error:
        die(error, as_json=as_json)
    if as_json:
        print_json({"status": status, "packs": reads})
        return
    print_table(
        ("PACK", "SIZE", "TOUCHED", "ASKED", "FROM MEMORY", "FROM CACHE", "STORE READS", "STORE BYTES", "FAILED"),
        (
            (
                digest[:19],
                amount(pack.size),
                amount(pack.touched_bytes),
                amount(pack.asked_bytes),
                amount(pack.hit_bytes),
                amount(pack.disk_bytes),
                str(pack.store_reads),
                amount(pack.store_bytes),
                str(pack.store_errors),
            )
            for digest, pack in sorted(reads.items(), key=lambda item: -item[1].store_bytes)
        ),
    )
    away = f"the store has not answered for {status.away_ms / 1000:.1f} s ({status.away_error})" if status.away_ms else "the store answers"
    cache = (
        f"{amount(status.cache_bytes)} of {amount(status.cache_limit_bytes)} on disk" if status.cache_limit_bytes else "no cache on disk"
    )
    tell(f"{away}; {status.waiting} reads wait; {amount(status.memory_bytes)} in memory, {cache}")


def register(store: typer.Typer) -> None:
    """Add `server` to `dsec store`."""
    store.command("server")(_server)
