"""Leases of uid ranges: never shared, found again after a restart, given back."""

import pytest

from dsec.resources.uid_ranges import BLOCK_RANGES, BLOCKS, RANGE_BASE, RANGE_IDS, UidRanges, range_base
from libdsec.errors import Overloaded


@pytest.fixture
def node(tmp_path):
    return tmp_path / "node"


def instance(tmp_path, node, name="run", **options):
    run = tmp_path / name
    run.mkdir(exist_ok=True)
    ranges = UidRanges(run, folder=node, **options)
    ranges.open()
    return ranges


def test_the_last_range_fits_into_32_bits():
    assert range_base(BLOCKS * BLOCK_RANGES - 1) + RANGE_IDS <= 0xFFFFFFFF
    assert range_base(0) == RANGE_BASE


def test_two_instances_never_share_a_range(tmp_path, node):
    one, two = instance(tmp_path, node, "one"), instance(tmp_path, node, "two")
    leased = [ranges.lease(f"sb-{number}") for number in range(BLOCK_RANGES + 3) for ranges in (one, two)]
    assert len(set(leased)) == len(leased)


def test_a_range_rests_before_it_is_leased_again(tmp_path, node):
    ranges = instance(tmp_path, node)
    first = ranges.lease("a")
    ranges.release(first, "a")
    assert ranges.lease("b") != first


def test_a_release_by_another_owner_changes_nothing(tmp_path, node):
    ranges = instance(tmp_path, node, blocks=1)
    leased = ranges.lease("a")
    ranges.release(leased, "b")
    assert leased not in {ranges.lease(str(number)) for number in range(BLOCK_RANGES - 1)}


def test_after_a_restart_living_sandboxes_claim_theirs(tmp_path, node):
    before = instance(tmp_path, node)
    held = [before.lease(f"sb-{number}") for number in range(3)]
    after = instance(tmp_path, node)
    assert all(after.claim(index, f"sb-{number}") for number, index in enumerate(held))
    assert not set(held) & {after.lease("new") for _ in range(BLOCK_RANGES)}


def test_a_claim_of_another_instances_range_is_refused(tmp_path, node):
    one, two = instance(tmp_path, node, "one"), instance(tmp_path, node, "two")
    assert not two.claim(one.lease("sb-1"), "sb-2")
    assert not two.claim(-1, "sb-2")


def test_a_claim_of_a_range_that_another_sandbox_has_is_refused(tmp_path, node):
    ranges = instance(tmp_path, node)
    index = ranges.lease("a")
    assert ranges.claim(index, "a")
    assert not ranges.claim(index, "b")


def test_blocks_of_an_instance_whose_run_folder_is_gone_are_free(tmp_path, node):
    gone = instance(tmp_path, node, "gone", blocks=1)
    gone.lease("a")
    other = instance(tmp_path, node, "other", blocks=1)
    with pytest.raises(Overloaded):
        other.lease("b")
    (tmp_path / "gone").rmdir()
    assert other.lease("b") >= 0


def test_closing_gives_back_only_what_no_sandbox_holds(tmp_path, node):
    ranges = instance(tmp_path, node)
    index = ranges.lease("a")
    ranges.close()
    assert len(list(node.glob("block-*"))) == 1
    ranges.release(index, "a")
    ranges.close()
    assert list(node.glob("block-*")) == []


def test_all_ranges_taken_is_overloaded_and_one_given_back_is_leased(tmp_path, node):
    ranges = instance(tmp_path, node, blocks=1)
    leased = [ranges.lease("a") for _ in range(BLOCK_RANGES)]
    with pytest.raises(Overloaded):
        ranges.lease("a")
    ranges.release(leased[7], "a")
    assert ranges.lease("b") == leased[7]
