"""Places of the scratch memory that have bytes in common."""

from __future__ import annotations

import random

from cudnn_actor.engines.cuda.running.overlaps import Overlaps
from cudnn_actor.engines.cuda.running.recipe import Scratch


def test_a_search_finds_what_has_bytes_in_common_with_a_place() -> None:
    rng = random.Random(5)
    for _ in range(60):
        places = [Scratch(rng.randrange(64), rng.choice((0, 1, 3, 8, 40))) for _ in range(30)]
        found = Overlaps((place, number) for number, place in enumerate(places[:20]))
        for number, place in enumerate(places[20:], 20):
            found.add(place, number)
        for place in places:
            end = place.offset + place.nbytes
            wanted = [
                number
                for number, each in enumerate(places)
                if each.offset < end and place.offset < each.offset + each.nbytes
            ]
            assert sorted(found.of(place)) == wanted


class Compared(int):
    """An offset that counts how often an end is compared with it."""

    count = 0

    def __lt__(self, other: int) -> bool:
        type(self).count += 1
        return int(self) < other


def test_a_search_looks_at_few_of_many_places_beside_each_other() -> None:
    places = [Scratch(256 * number, 256 - number % 7) for number in range(1000)]
    found = Overlaps((place, number) for number, place in enumerate(places))
    for number in (0, 500, 999):
        assert list(found.of(Scratch(Compared(256 * number), 100))) == [number]
    assert 3 <= Compared.count <= 60
