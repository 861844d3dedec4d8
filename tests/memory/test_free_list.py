"""One arena's free bytes."""

from __future__ import annotations

import random

import pytest

from cudnn_actor.memory import GRANULARITY, FreeList


def test_places_are_aligned_and_sizes_rounded_up_to_the_granularity() -> None:
    free = FreeList(4 * GRANULARITY)
    assert [free.allocate(1), free.allocate(257), free.allocate(256)] == [0, 256, 768]
    assert free.allocate(1) is None
    assert free.free_bytes == 0
    assert free.largest == 0


def test_the_smallest_hole_that_fits_is_taken() -> None:
    free = FreeList(16 * GRANULARITY)
    places = [free.allocate(n * GRANULARITY) for n in (4, 1, 2, 1)]
    assert places == [0, 1024, 1280, 1792]
    free.release(0)
    free.release(1280)
    assert free.allocate(2 * GRANULARITY) == 1280


def test_the_lowest_of_equal_holes_is_taken() -> None:
    free = FreeList(5 * GRANULARITY)
    for _ in range(5):
        free.allocate(1)
    free.release(768)
    free.release(256)
    assert free.allocate(1) == 256


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_release_joins_the_holes_on_both_its_sides(order: tuple[int, ...]) -> None:
    free = FreeList(3 * GRANULARITY)
    places = [free.allocate(1) for _ in range(3)]
    for which in order:
        place = places[which]
        assert place is not None
        free.release(place)
    assert (free.holes, free.largest, free.idle) == (1, 3 * GRANULARITY, True)


def test_a_place_is_not_released_twice() -> None:
    free = FreeList(2 * GRANULARITY)
    free.allocate(1)
    free.allocate(1)
    free.release(256)
    with pytest.raises(KeyError):
        free.release(256)
    with pytest.raises(KeyError):
        free.release(128)
    assert free.free_bytes == GRANULARITY


def test_no_two_places_are_one_even_of_no_bytes() -> None:
    free = FreeList(2 * GRANULARITY)
    assert [free.allocate(0) for _ in range(3)] == [0, GRANULARITY, None]


@pytest.mark.parametrize("nbytes", [0, -256, 255, 257])
def test_a_list_covers_a_positive_multiple_of_the_granularity(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes={nbytes}"):
        FreeList(nbytes)


def test_thousands_of_holes_still_end_as_one_block() -> None:
    free = FreeList(8_192 * GRANULARITY)
    places = [free.allocate(1) for _ in range(8_192)]
    order = [place for place in places if place is not None]
    assert len(set(order)) == 8_192
    random.Random(7).shuffle(order)
    for place in order[::2]:
        free.release(place)
    assert free.holes > 1_000
    for place in order[1::2]:
        free.release(place)
    assert free.allocate(8_192 * GRANULARITY) == 0


def test_a_place_can_be_taken_by_its_offset_in_an_empty_arena() -> None:
    for offset, nbytes, holes in ((0, 1, 1), (256, 300, 2), (768, 256, 1), (0, 1024, 0)):
        free = FreeList(4 * GRANULARITY)
        free.take(offset, nbytes)
        assert (free.holes, free.idle) == (holes, False)
        assert free.free_bytes == 4 * GRANULARITY - -(-nbytes // GRANULARITY) * GRANULARITY
        with pytest.raises(ValueError, match="no place"):
            free.take(512, 1)
        free.release(offset)
        assert (free.holes, free.largest, free.idle) == (1, 4 * GRANULARITY, True)


@pytest.mark.parametrize(("offset", "nbytes"), [(-256, 1), (8, 1), (768, 257), (1024, 1), (0, 1025)])
def test_no_place_outside_of_an_arena_is_taken(offset: int, nbytes: int) -> None:
    free = FreeList(4 * GRANULARITY)
    with pytest.raises(ValueError, match="no place"):
        free.take(offset, nbytes)
    assert free.largest == 4 * GRANULARITY
