"""How requests and results are packed: without a cluster."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import ray

from cudnn_actor.operations import MaxPool
from cudnn_actor.protocol.graphs.named_outputs import named_outputs
from cudnn_actor.ray.held import RayBuffer
from cudnn_actor.ray.packing import (
    INLINE_BYTES,
    Head,
    PackedResults,
    join,
    pack_results,
    split,
    unpack_results,
)

SMALL = np.arange(6, dtype=np.float32).reshape(2, 3)
HALF = np.zeros(INLINE_BYTES // 2 + 1, np.int8)
LARGE = np.zeros(INLINE_BYTES + 1, np.int8)
BUFFER = RayBuffer(pool="pool", number=1, dims=(2, 3))


class Own:
    """An object of the caller's, whose class a replica may not have."""


def same(found: Any, given: Any) -> bool:
    """Whether these are equal, or arrays with the same values."""
    return np.array_equal(found, given) if isinstance(given, np.ndarray) else bool(found == given)


@pytest.mark.parametrize(
    "args", [(), (None, 1.5, True, b"x"), (MaxPool, ("x", "w"), SMALL, [BUFFER, SMALL[:, 1]])]
)
def test_small_arguments_are_one_argument_of_bytes(args: tuple[Any, ...]) -> None:
    [first] = split("an incarnation", args)
    assert isinstance(first, bytes)
    incarnation, found = join(first, ())
    assert (incarnation, len(found)) == ("an incarnation", len(args))
    for each, given in zip(found, args, strict=True):
        if isinstance(given, list):
            assert all(map(same, each, given))
        else:
            assert same(each, given)


def test_small_arguments_fit_into_what_ray_sends_with_a_call() -> None:
    for array in (np.zeros(nbytes, np.int8) for nbytes in (0, INLINE_BYTES // 2, INLINE_BYTES - 8192)):
        first, *apart = split("an incarnation", ("compute", b"a graph" * 200, ("x",), array))
        assert not apart
        assert len(first) <= INLINE_BYTES


@pytest.mark.parametrize(
    ("args", "apart"),
    [
        ((1, LARGE, SMALL), (1, 2)),
        ((HALF, 2, HALF), (0, 2)),
        ((bytes(HALF), HALF), (1,)),
        ((np.array([{}]), 2), (0,)),
        ((SMALL.view(np.matrix), 2), (0,)),
        ((ray.ObjectRef(bytes(28)), SMALL), (0,)),
    ],
)
def test_other_arrays_and_references_are_arguments_of_their_own(
    args: tuple[Any, ...], apart: tuple[int, ...]
) -> None:
    first, *sent = split("an incarnation", args)
    assert isinstance(first, bytes)
    assert Head(*pickle.loads(first)).apart == apart
    assert all(each is args[place] for each, place in zip(sent, apart, strict=True))
    assert all(map(same, join(first, sent)[1], args))


@pytest.mark.parametrize("value", [Own(), Own, (1, Own()), [lambda: 1], (ray.ObjectRef(bytes(28)),), [LARGE]])
def test_what_a_replica_may_not_have_and_large_lists_are_left_to_rays_pickle(value: Any) -> None:
    first, *apart = split("an incarnation", (1, value))
    assert isinstance(first, Head)
    assert join(first, apart) == ("an incarnation", [1, value])


@pytest.mark.parametrize("form", ["an array", "by name", "a named tuple"])
def test_small_results_are_bytes(form: str) -> None:
    by_name = {"y": SMALL, "z": SMALL[0]}
    found: Any = {"an array": SMALL, "by name": by_name}.get(form)
    if form == "a named tuple":  # its class is among the latest, which are the ones that are kept
        found = named_outputs("Outputs", by_name)
    sent = pack_results(found)
    assert isinstance(sent, PackedResults)
    again = unpack_results(sent)
    assert type(again) is type(found)
    if isinstance(found, np.ndarray):
        assert np.array_equal(again, found)
    elif isinstance(found, dict):
        assert again.keys() == found.keys()
        assert all(np.array_equal(again[name], each) for name, each in found.items())
    else:
        assert all(map(np.array_equal, again, found))
        assert np.array_equal(again.y, SMALL)


def test_large_results_are_left_to_rays_store() -> None:
    for found in (LARGE, {"y": HALF, "z": HALF}):
        assert pack_results(found) is found
