"""What was read of an environment on one node is read ahead on the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from layers import environments_at, eventually

from dsec.environments.traces import load_trace, record_trace, replay_trace, save_trace
from libdsec.errors import NotFound

pytestmark = [pytest.mark.root, pytest.mark.slow]
MIB = 1 << 20


def _acquire(environments):
    return Path(environments.acquire(environments.resolve(["base"]).digests, "sb-1")[0])


def _read_some(seen):
    with open(seen / "big", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for at in (20 * MIB, 3 * MIB, 11 * MIB):
            os.pread(file.fileno(), 4096, at)


def test_a_trace_is_in_the_order_of_reading_and_small(state_run, slow_store):
    with environments_at(state_run.state, state_run.run, slow_store.target) as node:
        _read_some(_acquire(node))
        trace = record_trace(node.layers, node.access, node.resolve(["base"]).digests[-1])
    assert [read.offset // MIB for read in trace.reads] == [20, 3, 11]
    assert trace.bytes <= 2 * MIB


def test_the_next_node_reads_ahead_what_the_trace_says(state_run, slow_store, tmp_path):
    with environments_at(state_run.state, state_run.run, slow_store.target) as node:
        digest = node.resolve(["base"]).digests[-1]
        _read_some(_acquire(node))
        # the slow store is read-only, as a node's may be: the one who builds keeps the trace
        trace = record_trace(node.layers, node.access, digest)
    with environments_at(state_run.state, state_run.run, tmp_path / "store", way="server") as builder:
        save_trace(builder.layers, trace)
    other = state_run.state / "other", state_run.run / "other"
    slow_store.forget_reads()
    with environments_at(*other, slow_store.target) as node:
        seen = _acquire(node)
        eventually(lambda: sum(size for name, _, size in slow_store.reads() if name.endswith(".data")) >= trace.bytes, "it was read ahead")
        eventually(lambda: node.access.status().waiting == 0, "and has come")
        slow_store.forget_reads()
        _read_some(seen)
        assert [size for name, _, size in slow_store.reads() if name.endswith(".data")] == []
        # what is recorded after a replay is not less than what was replayed
        # (fetchers work side by side, so that its order is that of their ends)
        assert sorted(read.offset // MIB for read in record_trace(node.layers, node.access, digest).reads) == [3, 11, 20]


def test_a_replay_of_a_damaged_trace_reads_what_it_can(state_run, slow_store, tmp_path):
    with environments_at(state_run.state, state_run.run, slow_store.target) as node:
        digest = node.resolve(["base"]).digests[-1]
        _read_some(_acquire(node))
        trace = record_trace(node.layers, node.access, digest)
        trace.reads.insert(0, type(trace.reads[0])("sha256:" + "0" * 64, 0, MIB))
        assert replay_trace(node.access, trace) == trace.bytes - MIB
        file = tmp_path / "store/traces" / f"{digest[7:]}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"format":')
        assert load_trace(node.layers, digest) is None


def test_without_a_server_nothing_is_recorded(state_run, slow_store, tmp_path):
    with environments_at(state_run.state, state_run.run, tmp_path / "store") as node:
        assert node.access.direct
        with pytest.raises(NotFound, match="no server"):
            record_trace(node.layers, node.access, node.resolve(["base"]).digests[-1])


def test_the_command(state_run, slow_store, tmp_path):
    with environments_at(state_run.state, state_run.run, tmp_path / "store", way="server") as node:
        _read_some(_acquire(node))
        folders = {"DSEC_STATE": str(state_run.state), "DSEC_RUN": str(state_run.run), "DSEC_STORE": str(tmp_path / "store")}

        def trace(*options):
            command = [sys.executable, "-m", "dsec.cli", "env", "trace", "base", "--json", *options]
            return subprocess.run(command, env=os.environ | folders, capture_output=True, check=False, text=True)

        assert trace().returncode != 0
        recorded = json.loads(trace("--record").stdout)
        assert recorded["reads"] == 3
        assert json.loads(trace().stdout) == recorded
        assert json.loads(trace("--replay").stdout)["replayed_bytes"] == recorded["bytes"]


def test_the_server_tells_what_it_read(state_run, slow_store):
    folders = {"DSEC_STATE": str(state_run.state), "DSEC_RUN": str(state_run.run), "DSEC_STORE": str(slow_store.target)}

    def told(*options):
        command = [sys.executable, "-m", "dsec.cli", "store", "server", *options]
        return subprocess.run(command, env=os.environ | folders, capture_output=True, check=False, text=True)

    assert "no server of packs runs" in told().stderr
    with environments_at(state_run.state, state_run.run, slow_store.target) as node:
        _read_some(_acquire(node))
        [pack] = json.loads(told("--json").stdout)["packs"].values()
        assert pack["store_reads"] == 3
        assert pack["store_bytes"] == sum(size for name, _, size in slow_store.reads() if name.endswith(".data"))
        assert "the store answers" in told().stdout
