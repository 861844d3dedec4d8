"""How CUDA computes grouped products, as far as that shows without a GPU."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.operations.grouped_matmul import grouped_workspace
from cudnn_actor.protocol import DType, GraphTensor, GroupedMatMul, GroupedMatMulBackwardWeights, TensorSpec

from ...host_cuda import sources_of

FORWARD = GroupedMatMul(tokens=0, weights=1, offsets=2, y=3)
BACKWARD = GroupedMatMulBackwardWeights(tokens=0, dy=1, offsets=2, dweights=3)
OFFSETS = TensorSpec.packed((5,), DType.INT32)


def tensors(*specs: TensorSpec) -> list[GraphTensor]:
    return [GraphTensor(uid=n, dims=s.dims, strides=s.strides, dtype=s.dtype) for n, s in enumerate(specs)]


def half(dims: tuple[int, ...], strides: tuple[int, ...]) -> TensorSpec:
    return TensorSpec.strided(dims, strides, DType.BFLOAT16)


TOKENS, WEIGHTS = half((96, 64), (64, 1)), half((5, 64, 32), (2048, 32, 1))
RESULT = half((96, 32), (32, 1))


def of_forward(tokens: TensorSpec = TOKENS, weights: TensorSpec = WEIGHTS) -> str:
    return sources_of(FORWARD, tensors(tokens, weights, OFFSETS, RESULT))[-1]


def of_backward(tokens: TensorSpec = TOKENS, dy: TensorSpec = RESULT) -> str:
    return sources_of(BACKWARD, tensors(tokens, dy, OFFSETS, WEIGHTS))[-1]


@pytest.mark.parametrize("operand", ["A", "B"])
def test_operands_that_are_aligned_at_every_row_are_read_in_eights(operand: str) -> None:
    assert f"{operand}_WIDE = 1;" in of_forward()
    assert f"{operand}_WIDE = 1;" in of_backward()


TURNED = {"tokens": half((96, 64), (1, 96)), "dy": half((96, 32), (1, 96))}


@pytest.mark.parametrize("text", [of_forward(TURNED["tokens"]), of_backward(TURNED["tokens"])])
def test_tokens_whose_rows_are_contiguous_are_not_since_a_group_may_begin_at_any_row(text: str) -> None:
    assert "A_WIDE = 0;" in text
    assert "B_WIDE = 1;" in text


def test_neither_are_such_gradients() -> None:
    text = of_backward(dy=TURNED["dy"])
    assert "A_WIDE = 1;" in text
    assert "B_WIDE = 0;" in text


def test_transposed_weights_are_since_an_expert_begins_at_a_whole_matrix() -> None:
    text = of_forward(weights=half((5, 64, 32), (2048, 1, 64)))
    assert "B_ALONG = 1; constexpr int B_WIDE = 1;" in text


@pytest.mark.parametrize(
    "weights",
    [
        half((5, 64, 32), (2052, 32, 1)),
        half((5, 64, 32), (4096, 36, 1)),
        half((5, 64, 32), (4096, 64, 2)),
    ],
    ids=["experts apart", "rows apart", "elements apart"],
)
def test_weights_with_gaps_that_are_no_multiples_of_eight_are_not(weights: TensorSpec) -> None:
    assert "B_WIDE = 0;" in of_forward(weights=weights)


def test_the_workspace_holds_an_end_and_a_count_for_each_expert_and_for_the_rows_of_none() -> None:
    assert grouped_workspace(FORWARD, tensors(TOKENS, WEIGHTS, OFFSETS, RESULT)) == 6 * 2 * 8
