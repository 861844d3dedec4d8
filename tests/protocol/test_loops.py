"""What makes a loop: the names, dims and dtypes of its body, and what is refused."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_actor.protocol import DType, Graph, GraphBuilder, InvalidRequest, Loop, TensorSpec

from ..in_one_test import cases_in_one_test


def body() -> Graph:
    g = GraphBuilder()
    h, x, n = g.input("h", (2, 3)), g.input("x", (2, 3)), g.input("n", (1,), "int32")
    g.input("go", (1, 1), "bool")
    return g.build(
        h2=h + x, wide=g.concatenate([h, h], axis=0), n2=n + 1, on=(n < 3).reshape(1, 1), y=h * 2.0
    )


def with_update() -> Graph:
    g = GraphBuilder()
    x = g.input("x", (3,))
    return g.build(y=x * 2.0, updates={"x": x + 1.0})


def with_port(name: str, dims: tuple[int, ...] = (3,)) -> Graph:
    g = GraphBuilder()
    return g.build(y=g.input(name, dims) * 2.0)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no graph": (lambda: Loop(body=3), "body=3: is of type int where a Graph"),  # type: ignore[arg-type]
    "updates": (lambda: Loop(body=with_update()), "body=a graph with updates: changes its own inputs"),
    "a port of that name": (lambda: Loop(body=with_port("scratch")), "body=scratch: is the name of a port"),
    "no room for turns": (
        lambda: Loop(body=with_port("x", (1,) * 8), scanned=("x",)),
        "x=8 dims: leave no room for the dim of the turns",
    ),
    "no mapping": (lambda: Loop(body=body(), carried=[("h", "h2")]), "carried=.*: is not a mapping"),  # type: ignore[arg-type]
    "no input": (
        lambda: Loop(body=body(), carried={"hh": "h2"}),
        "carried='hh': is not the name of an input",
    ),
    "no output": (
        lambda: Loop(body=body(), carried={"h": "x"}),
        r"carried\['h'\]='x': is not the name of an o",
    ),
    "other dims": (
        lambda: Loop(body=body(), carried={"h": "wide"}),
        r"carried\['h'\]=float32\[4x3\] NCHW: has other dims, strides or another dtype than h, float32",
    ),
    "another dtype": (
        lambda: Loop(body=body(), carried={"h": "n2"}),
        r"carried\['h'\]=int32\[1\] NCHW: has oth",
    ),
    "an output twice": (
        lambda: Loop(body=body(), carried={"h": "h2", "x": "h2"}),
        "carried=h2, h2: has an output twice",
    ),
    "a scan of no input": (
        lambda: Loop(body=body(), scanned=("y",)),
        "scanned='y': is not the name of an input",
    ),
    "a text": (lambda: Loop(body=body(), scanned="x"), "scanned='x': is no tuple of names"),  # type: ignore[arg-type]
    "scanned twice": (lambda: Loop(body=body(), scanned=("x", "x")), "scanned='x': is named twice"),
    "scanned and carried": (
        lambda: Loop(body=body(), carried={"h": "h2"}, scanned=("h",)),
        "scanned='h': is named twice",
    ),
    "a condition that is not carried": (
        lambda: Loop(body=body(), carried={"h": "h2"}, condition="go"),
        "condition='go': is not the name of a carried input",
    ),
    "a condition of numbers": (
        lambda: Loop(body=body(), carried={"n": "n2"}, condition="n"),
        r"condition=int32\[1\] NCHW: is not one bool",
    ),
}


@cases_in_one_test
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        make()


def test_outputs_that_are_not_carried_are_stacked() -> None:
    loop = Loop(body=body(), carried={"h": "h2", "go": "on"}, scanned=("x",), condition="go")
    assert loop.stacked == ("wide", "n2", "y")
    specs = loop.specs(5)
    assert specs["x"] == TensorSpec.packed((5, 2, 3))
    assert specs["n2"] == TensorSpec.packed((5, 1), DType.INT32)
    assert specs["h"] == specs["h2"] == TensorSpec.packed((2, 3))
    assert list(specs) == list(loop.body.places)


def test_no_two_values_share_scratch() -> None:
    loop = Loop(body=body(), carried={"h": "h2", "go": "on"}, scanned=("x",))
    ends = 0
    for offset, spec in loop.working.values():
        assert offset >= ends
        assert offset % 256 == 0
        ends = offset + spec.nbytes
    assert loop.scratch.nbytes == ends


def test_a_change_of_the_mapping_does_not_change_the_loop() -> None:
    carried = {"h": "h2"}
    loop = Loop(body=body(), carried=carried)
    carried["x"] = "y"
    assert loop.carried == {"h": "h2"}


CHANGES: dict[str, Callable[[Any], object]] = {
    "set": lambda carried: operator.setitem(carried, "x", "y"),
    "delete": lambda carried: operator.delitem(carried, "h"),
    "merge": lambda carried: carried.__ior__({"x": "y"}),
    "clear": lambda carried: carried.clear(),
    "pop": lambda carried: carried.pop("h"),
    "popitem": lambda carried: carried.popitem(),
    "setdefault": lambda carried: carried.setdefault("x", "y"),
    "update": lambda carried: carried.update(x="y"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_nobody_changes_what_a_loop_carries(change: Callable[[Any], object]) -> None:
    loop = Loop(body=body(), carried={"h": "h2"})
    with pytest.raises(TypeError, match="immutable"):
        change(loop.carried)
    assert loop.carried == {"h": "h2"}


def test_loops_that_are_equal_have_one_hash_also_behind_a_pickle() -> None:
    loop = Loop(body=body(), carried={"h": "h2", "go": "on"})
    for other in (Loop(body=body(), carried={"go": "on", "h": "h2"}), pickle.loads(pickle.dumps(loop))):
        assert other == loop
        assert hash(other) == hash(loop)
        with pytest.raises(TypeError, match="immutable"):
            CHANGES["set"](other.carried)
