"""Whatever was done to files in a sandbox: packs, restores and forks of it show the tree that a plain model says."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys

import pytest
from file_model import Model, draw_operation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.root, pytest.mark.slow]

EXAMPLES = int(os.environ.get("DSEC_TREE_EXAMPLES", "12"))
"""Some hundreds take minutes."""


async def work(draw, box, model: Model) -> None:
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 14))):
        lines += draw_operation(draw, model, b"/t")
    await box.file(lines)
    assert box.tree() == model.seen()


async def restore(node, box, model: Model):
    name = node.name()
    await box.pack(name)
    restored = await node.create(name)
    assert restored.tree(times=True) == box.tree(times=True)
    assert restored.tree() == model.seen()
    await box.stop()
    model.becomes_a_layer()
    return restored


async def fork(draw, box, model: Model):
    """Two children; one goes on, and neither its parent nor its sibling sees what it does."""
    before = box.tree(times=True)
    child, sibling = await box.fork(2)
    assert child.tree(times=True) == sibling.tree(times=True) == before
    await work(draw, child, model)
    assert box.tree(times=True) == sibling.tree(times=True) == before
    await box.stop()
    await sibling.stop()
    return child


async def life(draw, node) -> None:
    model = Model()
    box = await node.create()
    try:
        for _ in range(draw(st.integers(1, 4))):
            await work(draw, box, model)
            box = await restore(node, box, model) if draw(st.booleans()) else await fork(draw, box, model)
    finally:
        await asyncio.gather(*(node.edge.stop(sandbox_id) for sandbox_id in list(node.edge._core.sandboxes)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layers", [2, 50], ids=["merged-each-time", "stacked"])
def test_packs_restores_and_forks_show_what_the_model_says(home, open_node, layers):
    """`layers`: with few, each snapshot is merged with those before it; with many, they stack."""

    small = 0 if layers > 2 else 1 << 30
    with asyncio.Runner() as runner:
        opened = open_node(home, snapshot_layers=layers, snapshot_small_bytes=small)
        node = runner.run(opened.__aenter__())
        try:

            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(st.data())
            def each(data) -> None:
                # what it draws is drawn in the context that hypothesis made for it
                runner.run(life(data.draw, node), context=contextvars.copy_context())

            each()
        finally:
            runner.run(opened.__aexit__(*sys.exc_info()))
