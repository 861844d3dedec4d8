"""Where a kernel of cuDNN's waits for those before it: its operands beside a product must be there."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise, elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Leaf
from cudnn_actor.engines.cuda.running.barriers import waits, waits_at_start
from cudnn_actor.engines.cuda.running.recipe import (
    Buffer,
    GraphStep,
    KernelStep,
    OperationStep,
    Scratch,
    Source,
    Step,
)
from cudnn_actor.protocol import DType, GraphTensor
from cudnn_actor.protocol.operations import MatMul

from ....in_one_test import cases_in_one_test

X, BIAS, Y = Buffer(0), Buffer(1), Buffer(2)
A, B, C = (Scratch(offset, 256) for offset in (0, 256, 512))


def library(*sources: Source, beside: tuple[int, ...] = ()) -> GraphStep:
    """cuDNN's, with some of its operands beside the product."""
    return GraphStep("eng4", 0, tuple(range(len(sources))), sources, beside=beside)


def product(*sources: Source, launcher: str = "library") -> OperationStep:
    """Of another library, or a kernel of our own."""
    tensors = tuple(
        GraphTensor(uid=uid, dims=(4, 4), strides=(4, 1), dtype=DType.FLOAT32) for uid in range(3)
    )
    return OperationStep(operation=MatMul(a=0, b=1, y=2), tensors=tensors, sources=sources, launcher=launcher)


def kernel(*sources: Source, size: int = 4) -> KernelStep[Elementwise]:
    return KernelStep(elementwise(Leaf(0, DType.FLOAT32), DType.FLOAT32, (size,), [(1,), (1,)]), sources)


@cases_in_one_test
@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        # The residual A is written just before, or two kernels before, or behind a barrier.
        ([library(X, A), library(X, A, Y, beside=(1,))], [False, True]),
        ([library(X, A), library(A, B), library(B, A, Y, beside=(1,))], [False, False, True]),
        (
            [library(X, A), library(X, A, B, beside=(1,)), library(B, BIAS, Y, beside=(1,))],
            [False, True, False],
        ),
        # What a product itself reads, it waits for.
        ([library(X, A), library(A, Y)], [False, False]),
        # A bias that nothing writes.
        ([library(X, A), library(A, BIAS, Y, beside=(1,))], [False, False]),
        # A kernel of ours waits for all before it, but its own results are not yet there.
        ([library(X, A), kernel(Y, X), library(X, A, beside=(1,))], [False, False, False]),
        ([library(X, A), kernel(B, X), library(X, B, Y, beside=(1,))], [False, False, True]),
        # One of no elements is not launched.
        ([library(X, A), kernel(Y, X, size=0), library(X, A, beside=(1,))], [False, False, True]),
        # Another library's may begin early, too.
        ([library(X, A), product(X, X, Y), library(X, A, beside=(1,))], [False, False, True]),
        ([library(X, A), product(X, X, Y, launcher="kernel"), library(X, A, beside=(1,))], [False] * 3),
        # A buffer that a step before has written.
        ([library(X, Y), library(X, Y, A, beside=(1,))], [False, True]),
        # Another part of the scratch memory may be a view.
        ([library(X, A), library(X, C, Y, beside=(1,))], [False, True]),
    ],
)
def test_a_barrier_stands_before_what_reads_results_that_may_not_be_there(
    steps: list[Step], wanted: list[bool]
) -> None:
    assert waits(steps) == wanted


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([library(X, BIAS, Y, beside=(1,))], True),
        ([library(X, Y)], False),
        ([kernel(A, X), library(A, BIAS, Y, beside=(1,))], False),
        ([library(X, A), library(A, BIAS, Y, beside=(1,))], True),
        ([library(X, A), library(X, A, B, beside=(1,)), library(B, BIAS, Y, beside=(1,))], False),
    ],
)
def test_and_before_a_plan_whose_first_kernels_read_what_others_may_write(
    steps: list[Step], wanted: bool
) -> None:
    assert waits_at_start(steps, waits(steps)) is wanted
