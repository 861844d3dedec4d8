"""Which products are computed by those of whole vectors, and that these compute the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.planning.aligned_products import aligned_product
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import DType, OperationGraph
from cudnn_actor.protocol.operations import MatMul

from ....in_one_test import cases_in_one_test
from .test_products import added, biased, evaluated, memory, product

ODD = {
    "columns in order": (product(a=(2, 5, 16), b=(16, 27), turned="b"), ["matmul", "matmul", "slice"]),
    "rows in order": (product(a=(2, 5, 16), b=(16, 27)), ["pad", "matmul", "slice"]),
    "a bias": (product(biased, a=(5, 16), b=(16, 27)), ["pad", "pad", "matmul", "slice"]),
    "a function of parts": (
        product(lambda g, y: g.relu(biased(g, y)), (2, 5, 16), (16, 27), turned="b"),
        ["matmul", "slice", "matmul", "slice"],
    ),
    "a function that cuBLASLt has not": (
        product(lambda g, y: g.gelu(y) * 2.0, (2, 5, 16), (16, 27), turned="b"),
        ["matmul", "matmul", "slice"],
    ),
    "a result in float32": (product(a=(5, 16), b=(16, 27), result=DType.FLOAT32), ["pad", "matmul", "slice"]),
    "few columns": (product(a=(5, 16), b=(16, 9), turned="b"), ["pad", "matmul", "slice"]),
    "the inner dim": (product(biased, (2, 5, 17), (17, 24)), ["pad", "pad", "matmul"]),
    "the inner dim, and a residual": (product(added, (2, 5, 17), (17, 24)), ["pad", "pad", "matmul"]),
    "both": (product(biased, (2, 5, 17), (17, 27), turned="b"), ["pad", "pad", "pad", "matmul", "slice"]),
    "a batch": (product(a=(3, 5, 16), b=(3, 16, 27), turned="b"), ["matmul", "matmul", "slice"]),
    "a batch of rows": (product(a=(3, 5, 17), b=(3, 17, 27)), ["pad", "pad", "matmul", "slice"]),
    "a turned": (product(a=(8, 17), b=(17, 27), turned="a"), ["pad", "pad", "matmul", "slice"]),
}
"""Products, and the first operation of each piece that they become."""


def has_whole_vectors(graph: OperationGraph) -> bool:
    """Whether the sizes and strides of each product's matrices are those of vectors of 16 bytes."""
    products = [each for each in graph.operations if isinstance(each, MatMul)]
    matrices = [graph.tensor(uid) for each in products for uid in (each.a, each.b, each.y)]
    sizes = {graph.tensor(each.a).dims[-1] for each in products} | {each.dims[-1] for each in matrices}
    steps = {step for each in matrices for step in each.strides if step != 1}
    return not any(number % 8 for number in sizes | steps)


@cases_in_one_test
@pytest.mark.parametrize("name", ODD)
def test_products_of_whole_vectors_compute_the_same(name: str) -> None:
    graph, kinds = ODD[name]
    found = aligned_product(graph, every=True)
    assert found is not None
    assert {*found.bound} == {*graph.bound}
    parts = cut(found)
    assert parts is not None
    assert [piece.graph.operations[0].kind for piece in parts.pieces] == kinds
    multiplied = [each.graph for each in parts.pieces if isinstance(each.graph.operations[0], MatMul)]
    assert all(map(has_whole_vectors, multiplied))
    assert {len(each.operations) for each in multiplied} == {len(graph.operations)}
    memories = {uid: memory(graph.tensor(uid), uid) for uid in graph.bound}
    others = {uid: values.copy() for uid, values in memories.items()}
    evaluated(graph, memories)
    evaluated(found, others)
    for uid, wanted in memories.items():
        np.testing.assert_array_equal(others[uid], wanted)


def test_products_of_whole_vectors_are_made_only_where_they_are_expected_to_pay() -> None:
    def made(a: tuple[int, ...], b: tuple[int, ...], turned: str = "b") -> bool:
        return aligned_product(product(a=a, b=b, turned=turned)) is not None

    assert made((32, 64, 768), (768, 50_257))
    assert made((32, 64, 768), (768, 50_257), turned="")
    assert made((2048, 767), (767, 4096))
    assert not made((2048, 768), (768, 50_256))
    assert not made((512, 64), (64, 50_257))
    assert not made((256, 256), (256, 257))
    assert not made((1, 4096), (4096, 50_257))


def test_other_products_are_left_as_they_are() -> None:
    def made(graph: OperationGraph) -> bool:
        return aligned_product(graph, every=True) is not None

    assert not made(product(a=(5, 16), b=(16, 24)))
    assert not made(product(a=(5, 16), b=(16, 27), dtype=DType.FLOAT32))
    assert not made(product(a=(5, 16), b=(16, 7)))
    assert not made(product(a=(5, 16), b=(16, 27), turned="a"))
    assert not made(product(added, (5, 16), (16, 27)))
    assert not made(product(lambda g, y: y + g.input("c", (5, 1), DType.BFLOAT16), (5, 16), (16, 27)))
    graph = product(lambda g, y: y + g.input("bias", (1, 27), DType.BFLOAT16), (1, 16), (16, 27))
    uids = {tensor.name: tensor.uid for tensor in graph.tensors}
    assert made(graph)
    y = msgspec.structs.replace(graph.tensor(graph.results[0]), overwrites=uids["bias"])
    others = [tensor for tensor in graph.tensors if tensor.uid != y.uid]
    assert not made(OperationGraph(tensors=(*others, y), operations=graph.operations))
