"""What cuDNN's attention is given in the place of some lengths, and what it is not given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.expressions import Constant, Expression, Leaf, Value
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.operations.attention import attention_masks, attention_operands
from cudnn_actor.protocol import Attention, AttentionBackward, DType, TensorSpec
from cudnn_actor.protocol.operations import (
    GraphTensor,
    Operation,
    PointwiseMode,
    RandomBernoulli,
    alibi_slopes,
)

from ....in_one_test import cases_in_one_test

ROWS, COLUMNS = 9, 13
LENGTHS = (-(2**31), -3, 0, 1, 5, ROWS, COLUMNS, 100, 2**31 - 1)


def tensors(*names: str, columns: int = COLUMNS) -> dict[str, GraphTensor]:
    dims = {"q": (2, 4, ROWS, 8), "k": (2, 2, columns, 8)}
    specs = {name: TensorSpec.packed(dims.get(name, (2,))) for name in ("q", "k", *names)}
    return {
        name: GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=DType.INT32)
        for uid, (name, spec) in enumerate(specs.items())
    }


def value(node: Value, leaves: Sequence[int]) -> float:
    match node:
        case Constant(value=number):
            return number
        case Leaf(number=number):
            return leaves[number]
        case Expression(mode=PointwiseMode.MUL, operands=(first, second)):
            return value(first, leaves) * value(second, leaves)
        case Expression(mode=PointwiseMode.CLIP, operands=(operand,), parameters=(least, most)):
            return min(max(value(operand, leaves), least), most)
    raise AssertionError(node)


def computed(operation: object, given: dict[str, GraphTensor]) -> dict[str, dict[tuple[int, ...], float]]:
    """For each operand that is computed first, its value for all lengths that may be given."""
    compute = IMPLEMENTATIONS[type(operation)].computed  # type: ignore[index]
    assert compute is not None
    names = [name for name in given if name.startswith("lengths")]
    found: dict[str, dict[tuple[int, ...], float]] = {}
    for name, wanted in compute(operation, given).items():
        assert wanted.dims == (2,)
        assert wanted.dtype is DType.INT32
        values = found.setdefault(name, {})
        assert not isinstance(wanted.value, Operation)
        for lengths in itertools.product(LENGTHS, repeat=len(names)):
            by_name = dict(zip(names, lengths, strict=True))
            values[lengths] = value(wanted.value, [by_name[read] for read in wanted.operands])
    return found


FORWARD: Attention[int] = Attention(q=0, k=1, v=2, y=3)
BACKWARD: AttentionBackward[int] = AttentionBackward(dy=0, q=1, k=2, v=3, y=4, statistics=5, dq=6, dk=7, dv=8)


def clipped(length: int, most: int) -> int:
    return min(max(length, 0), most)


def test_both_lengths() -> None:
    found = computed(FORWARD, tensors("lengths_q", "lengths_kv"))
    for of_q, of_kv in itertools.product(LENGTHS, repeat=2):
        keys = clipped(of_kv, COLUMNS)
        assert found["lengths_kv"][of_q, of_kv] == max(keys, 1)
        assert found["lengths_q"][of_q, of_kv] == (clipped(of_q, ROWS) if keys else 0)


def test_lengths_of_keys_alone() -> None:
    found = computed(FORWARD, tensors("lengths_kv"))
    for of_kv in LENGTHS:
        keys = clipped(of_kv, COLUMNS)
        assert found["lengths_kv"][of_kv,] == max(keys, 1)
        assert found["lengths_q"][of_kv,] == (ROWS if keys else 0)


def test_lengths_of_queries_alone() -> None:
    found = computed(FORWARD, tensors("lengths_q"))
    assert {of_q: found["lengths_q"][of_q,] for of_q in LENGTHS} == {n: clipped(n, ROWS) for n in LENGTHS}
    assert set(found["lengths_kv"].values()) == {COLUMNS}


@pytest.mark.parametrize(
    ("columns", "given"), [(13, True), (127, True), (129, True), (128, False), (256, False)]
)
def test_a_gradient_whose_keys_end_in_a_tile_gets_lengths(columns: int, given: bool) -> None:
    found = computed(BACKWARD, tensors(columns=columns))
    assert bool(found) is given
    if given:
        assert found == {"lengths_q": {(): ROWS}, "lengths_kv": {(): columns}}


def test_a_forward_pass_without_lengths_is_left_alone() -> None:
    assert computed(FORWARD, tensors()) == {}


def test_dropout_gets_the_weights_that_are_kept() -> None:
    """As `RandomBernoulli` draws them, of the dims of the scores and of q's dtype."""
    for operation in (FORWARD, BACKWARD):
        given = tensors(columns=256) | {"state": tensors("state")["state"]}
        found = attention_operands(msgspec.structs.replace(operation, dropout=0.25, state=9), given)
        assert list(found) == ["state"]
        value, operands, dims, dtype = found["state"]
        assert isinstance(value, RandomBernoulli)
        assert (value.probability, value.dims, value.dtype) == (0.75, dims, dtype)
        assert (dims, dtype, operands) == ((2, 4, ROWS, 256), given["q"].dtype, ("state",))


@pytest.mark.parametrize(
    ("names", "columns", "left", "refused"),
    [((), 13, 3, False), ((), 8, 3, True), ((), 8, 8, False), (("lengths_kv",), 13, 3, True)],
)
def test_a_window_without_keys_is_not_given_to_cudnn(
    names: tuple[str, ...], columns: int, left: int, refused: bool
) -> None:
    operation = msgspec.structs.replace(FORWARD, window_left=left)
    given = tensors(*names, columns=columns)
    with pytest.raises(Refused, match="no key") if refused else contextlib.nullcontext():
        attention_operands(operation, given)


@cases_in_one_test
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),
        ({"causal": True}, {"use_causal_mask": True}),
        ({"window_left": 4}, {"diagonal_band_left_bound": 5}),
        ({"window_right": 4}, {"diagonal_band_right_bound": 4}),
        (
            {"window_left": 0, "window_right": 3, "causal": True},
            {"diagonal_band_left_bound": 1, "use_causal_mask": True},
        ),
        ({"window_left": 8, "window_right": 12}, {}),
        (
            {"slopes": alibi_slopes(4), "window_right": 0},
            {"use_alibi_mask": True, "diagonal_band_right_bound": 0},
        ),
        ({"slopes": (1.0, 2.0, 3.0, 4.0), "causal": True}, None),
        ({"slopes": alibi_slopes(4)}, None),
        ({"slopes": alibi_slopes(4), "window_right": 2}, None),
    ],
)
def test_what_cudnn_is_told_of_masks(options: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    given = tensors()
    operation = msgspec.structs.replace(FORWARD, **options)
    if wanted is None:
        with pytest.raises(Refused, match=r"slopes|causal"):
            attention_masks(operation, given["q"], given["k"])
    else:
        found = attention_masks(operation, given["q"], given["k"])
        assert found == {"use_causal_mask": False} | wanted
