"""Tensors that are needed at the same time lie apart, however many those are."""

from __future__ import annotations

import itertools

import pytest

from cudnn_actor.engines.scratch_places import Held, places


@pytest.mark.parametrize("alignment", [64, 256])
@pytest.mark.parametrize("count", [10, 300])
def test_tensors_that_are_held_to_the_end_lie_apart(count: int, alignment: int) -> None:
    """Of 300, each is held beside more than are compared one by one."""
    held = [Held(uid, alignment * (1 + uid % 3), uid, count) for uid in range(count)]
    offsets, nbytes = places(held)
    spans = sorted((offsets[one.uid], offsets[one.uid] + one.size) for one in held)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] == nbytes
    assert all(offset % alignment == 0 for offset in offsets.values())
