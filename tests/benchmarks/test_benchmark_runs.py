"""The benchmarks of environments run through in their smallest size, and say what they must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(600)]
PROJECT = Path(__file__).resolve().parents[2]


def run(name: str, *options: str) -> dict:
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", *options]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document["benchmark"] == name
    assert all("met" in judged for judged in document["budgets"].values())
    return document


def test_ondemand():
    document = run("ondemand", "--images", "2", "--sandboxes", "6", "--rounds", "1")
    cold, warm, eager = document["dsec"]["cold"], document["dsec"]["warm"], document["peers"]["eager"]
    assert [one["failures"] for one in (cold, warm, eager)] == [0, 0, 0], (cold, warm, eager)
    assert [one["n"] for one in (cold, warm, eager)] == [6, 6, 6]
    assert 0 < cold["image_share_read"] < 0.5, "a job reads little of its image"
    assert warm["store"]["read_mb"] < cold["store"]["read_mb"] / 10
    assert cold["written_mb"] < eager["written_mb"]


def test_layers():
    document = run("layers")
    layers, untar = document["dsec"]["layers"], document["peers"]["untar"]
    assert (layers["n"], layers["failures"], untar["failures"]) == (4, 0, 0)
    assert untar["written_mb"] > sum(document["parts_mb"].values()) > layers["written_mb"] * 5
    assert document["peers"]["bind_mount"].get("failures") == 0 or document["peers"]["bind_mount"]["absent"]


def test_fork():
    document = run("fork", "--peers", "")
    ours = document["dsec"]
    assert ours["fork_10"]["failures"] == ours["fork_1"]["failures"] == ours["restore"]["failures"] == 0
    assert 0 < ours["fork_10"]["ready"]["p50_ms"] <= ours["fork_10"]["p50_ms"]
    assert 0 < ours["pack_diff"]["stopped"]["max_ms"] < ours["pack_diff"]["max_ms"]
    assert ours["pack_diff"]["layer"]["logical_mb"] >= 10


def test_build():
    document = run("build", "--images", "2", "--rounds", "1", "--peers", "mkfs_erofs", "--compressions", "zstd")
    ours = document["dsec"]["zstd"]
    assert ours["synced_s"] > 0
    assert ours["again"]["written_mb"] < ours["written_mb"], "what is known is not stored again"
    assert document["peers"]["mkfs_erofs"]["zstd"]["stored_mb"] > 0
    sharing = document["sharing"]
    assert sharing["ratio_to_images"] > 1.5, "two images of the same root"
    assert sharing["stored_mb_after_each"] == sorted(sharing["stored_mb_after_each"])
