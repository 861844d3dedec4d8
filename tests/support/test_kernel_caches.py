"""Kernels that cuDNN compiled for one graph are used for another, where they are what it would compile."""

from __future__ import annotations

import pytest

from cudnn_actor.protocol import OperationGraph

from ..engines.cuda.cudnn.test_kernel_caches import biased, convolution, product
from .child import Child
from .kernels import Built, built


@pytest.mark.parametrize(
    "graphs",
    [
        pytest.param([convolution(8), convolution(5), convolution(1, 256, 56)], id="convolution"),
        pytest.param([product(4096), product(127), product(65, 768)], id="product"),
        pytest.param([product(2), product(4096), product(4096, columns=64)], id="narrow"),
    ],
)
def test_graphs_of_a_class_get_the_kernel_that_they_would_have(
    child: Child, graphs: list[OperationGraph]
) -> None:
    found: list[Built] = child.call(built, graphs)
    assert all(one.kept for one in found)
    assert all(one.same_kernels for one in found)
    assert not any(one.stale for one in found)


def test_a_transposed_operand_does_not_get_the_kernel_of_one_that_is_not(child: Child) -> None:
    square = [product(inner=96, transposed=transposed) for transposed in (False, True)]
    assert all(one.same_kernels for one in child.call(built, square))


def test_what_is_compiled_already_has_no_cache(child: Child) -> None:
    assert [one.kept for one in child.call(built, [biased(8), biased(5)])] == [False, False]
