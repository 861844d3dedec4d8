"""The bounded cache keeps what was used last, within both of its bounds, whoever uses it."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.memory.least_recent import LeastRecent

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "peek", "pop"]), st.integers(0, 6), st.integers(0, 50)),
    max_size=40,
)


@given(st.integers(1, 5), st.integers(0, 100), STEPS)
def test_any_use_leaves_what_a_list_in_order_of_use_would(
    most: int, limit: int, steps: list[tuple[str, int, int]]
) -> None:
    cache: LeastRecent[int, int] = LeastRecent(most=most, nbytes=limit)
    wanted: OrderedDict[int, tuple[int, int]] = OrderedDict()  # key → value, size
    for number, (step, key, size) in enumerate(steps):
        value, _ = wanted.get(key, (None, 0))
        match step:
            case "put":
                cache.put(key, number, size)
                wanted[key] = number, size
                wanted.move_to_end(key)
                while len(wanted) > 1 and (
                    len(wanted) > most or sum(size for _, size in wanted.values()) > limit
                ):
                    wanted.popitem(last=False)
            case "get":
                assert cache.get(key) == value
                if key in wanted:
                    wanted.move_to_end(key)
            case "peek":
                assert cache.peek(key) == value
            case "pop":
                cache.pop(key)
                wanted.pop(key, None)
        assert list(cache.items()) == [(key, value) for key, (value, _) in wanted.items()]
        assert cache.nbytes == sum(size for _, size in wanted.values())


def test_the_entry_that_was_used_last_is_gone_once_it_was_dropped_or_replaced() -> None:
    cache: LeastRecent[str, str] = LeastRecent(most=2, nbytes=100)
    cache.put("one", "old", 10)
    assert cache.get("one") == "old"
    cache.put("one", "new", 10)
    assert cache.get("one") == "new"
    cache.pop("one")
    assert cache.get("one") is None
    cache.put("one", "last", 10)
    assert cache.get("one") == "last"
    cache.put("two", "", 10)
    assert cache.get("one") == "last"
    cache.put("three", "", 10)
    assert list(cache) == ["one", "three"]
    cache.clear()
    assert cache.get("one") is None


def test_threads_that_use_it_together_leave_a_right_sum_within_the_bounds() -> None:
    cache: LeastRecent[int, int] = LeastRecent(most=20, nbytes=500)

    def use(start: int) -> None:
        for number in range(start, start + 3000):
            cache.put(number % 61, number % 97, number % 97)
            cache.get((number * 7) % 61)
            cache.pop((number * 5) % 61)

    threads = [threading.Thread(target=use, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.nbytes == sum(cache.values()) <= 500
    assert len(cache) <= 20
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


class Leaver:
    """Uses the cache when it is collected, as a finalizer may, in the midst of another use."""

    def __init__(self, cache: LeastRecent[int, object]) -> None:
        self._cache = cache

    def __del__(self) -> None:
        self._cache.pop(1)
        self._cache.put(2, None, 5)


def test_a_finalizer_that_uses_it_in_the_midst_of_a_use_finds_it_whole() -> None:
    cache: LeastRecent[int, object] = LeastRecent(most=4, nbytes=50)
    for number in range(200):
        cache.put(number % 5, Leaver(cache), 7)
        cache.put(1, object(), 3)
    gc.collect()
    sizes = {Leaver: 7, object: 3, type(None): 5}
    assert cache.nbytes == sum(sizes[type(value)] for value in cache.values()) <= 50
    assert len(cache) <= 4
    cache.clear()
    assert list(cache.values()) in ([], [None])  # as the last of them has left it
