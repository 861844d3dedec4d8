"""Which products run on copies with padded rows, and what those compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.planning.padded_rows import padded, plan_of_padded
from cudnn_actor.engines.cuda.planning.products import product_of
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import Buffer, ProductStep, Recipe, Scratch
from cudnn_actor.protocol import DType, GraphTensor, OperationGraph
from cudnn_actor.protocol.operations import MatMul

from .test_products import added, biased, evaluated, memory, product, run_of, seen

ODD = {
    "result and weight": (product(a=(5, 8), b=(8, 7)), "by"),
    "result in float32": (product(a=(5, 8), b=(8, 7), result=DType.FLOAT32, turned="b"), "y"),
    "columns of the weight": (product(a=(5, 8), b=(8, 7), turned="b"), "y"),
    "inner dim": (product(biased, a=(2, 5, 9), b=(9, 8)), "a"),
    "both of the inner dim": (product(a=(5, 9), b=(9, 8), turned="b"), "ab"),
    "residual": (product(lambda g, y: added(g, biased(g, y)), a=(2, 5, 8), b=(8, 7)), "bcy"),
    "a batch": (product(added, a=(3, 5, 7), b=(3, 7, 9)), "abcy"),
    "columns of a": (product(a=(9, 8), b=(8, 8), turned="a"), "a"),
}


def letters(graph: OperationGraph, uids: Iterable[int]) -> str:
    """Which operands those are: a and b, the result y, or c, what is added to it."""
    operation = graph.operations[0]
    assert isinstance(operation, MatMul)
    known = {operation.a: "a", operation.b: "b", graph.results[0]: "y"}
    return "".join(sorted(known.get(uid, "c") for uid in uids))


def starts(tensor: GraphTensor) -> list[int]:
    """Where rows or columns begin, in bytes, but for the stride within them."""
    steps = [step for size, step in zip(tensor.dims, tensor.strides, strict=True) if size > 1]
    return [step * tensor.dtype.itemsize for step in steps if step != 1]


@pytest.mark.parametrize("name", ODD)
def test_a_product_on_padded_rows_computes_the_same(name: str) -> None:
    graph, odd = ODD[name]
    found = padded(graph, every=True)
    assert found is not None
    assert letters(graph, found.forms) == odd
    bound = map(found.graph.tensor, found.graph.bound)
    assert not any(at % 16 for tensor in bound for at in starts(tensor) if tensor.dims[-2] > 1)
    memories = {uid: memory(graph.tensor(uid), uid) for uid in graph.bound}
    wide = dict(memories)
    for uid, form in found.forms.items():
        given = graph.tensor(uid)
        wide[uid] = np.full(form.spec.nbytes // form.dtype.itemsize, np.nan).astype(form.dtype.numpy)
        _view(wide, form)[...] = _view(memories, given)
    evaluated(graph, memories)
    run_of(found.product, wide)
    (y,) = graph.results
    got, wanted = _view(wide, found.graph.tensor(y)), _view(memories, graph.tensor(y))
    np.testing.assert_allclose(got.astype(float), wanted.astype(float), rtol=2**-7, atol=1e-6)


def test_copies_stand_around_the_product() -> None:
    graph, _ = ODD["residual"]
    found = padded(graph, every=True)
    assert found is not None
    inner = msgspec.structs.replace(found.product.product, algorithm=bytes(64), workspace=512)
    numbers = {uid: Buffer(number) for number, uid in enumerate(found.graph.bound)}
    step = ProductStep(inner, (*(numbers[uid] for uid in found.product.uids), Scratch(0)))
    recipe = Recipe("", (step,), 512, len(found.graph.bound), 0)
    plan = plan_of_padded(graph, found, CudaPlan(recipe, ()), None)
    before, other, product, after = plan.recipe.steps
    places = {uid: Buffer(number) for number, uid in enumerate(graph.bound)}
    (y,) = graph.results
    copied = {copy.sources[1]: copy.sources[0] for copy in (before, other)}
    assert {*copied} == {places[uid] for uid in found.forms if uid != y}
    assert after.sources[0] == places[y]
    wide = {uid: copied.get(places[uid], places[uid]) for uid in places} | {y: after.sources[1]}
    assert product.sources[:-1] == tuple(wide[uid] for uid in found.product.uids)
    scratch = sum(-(-form.spec.nbytes // 256) * 256 for form in found.forms.values())
    assert product.sources[-1] == Scratch(scratch)
    assert plan.recipe.scratch == scratch + 512
    assert len({*copied.values(), after.sources[1]}) == len(found.forms)


def _view(memories: Mapping[int, np.ndarray], tensor: GraphTensor) -> np.ndarray:
    return seen(memories[tensor.uid], 0, tensor.dims, tensor.strides)


def test_copies_are_made_only_where_they_are_expected_to_pay() -> None:
    def copied(a: tuple[int, ...], b: tuple[int, ...], turned: str = "b") -> str | None:
        graph = product(a=a, b=b, turned=turned)
        found = padded(graph)
        return None if found is None else letters(graph, found.forms)

    assert copied((32, 64, 768), (768, 50_257)) == "y"
    assert copied((2048, 767), (767, 4096)) == "ab"
    assert copied((2048, 768), (768, 50_256)) is None
    assert copied((512, 64), (64, 50_257)) is None
    assert copied((256, 256), (256, 257)) is None
    assert copied((1, 4096), (4096, 50_257)) is None


def test_other_products_have_no_padded_rows() -> None:
    assert padded(product(a=(5, 8), b=(8, 8)), every=True) is None
    assert padded(product(a=(5, 8), b=(8, 7), dtype=DType.FLOAT32), every=True) is None
    assert padded(product(lambda g, y: g.gelu(biased(g, y)), a=(5, 8), b=(8, 7)), every=True) is None


def test_a_result_over_a_residual_is_copied_there_when_that_has_been_read() -> None:
    graph = product(added, (5, 8), (8, 7))
    uids = {tensor.name: tensor.uid for tensor in graph.tensors}
    y = msgspec.structs.replace(graph.tensor(graph.results[0]), overwrites=uids["c"])
    others = [tensor for tensor in graph.tensors if tensor.uid != y.uid]
    graph = OperationGraph(tensors=(*others, y), operations=graph.operations)
    assert product_of(graph) is not None
    found = padded(graph, every=True)
    assert found is not None
    assert {y.uid, uids["c"]} <= {*found.forms}
    assert all(tensor.overwrites is None for tensor in found.graph.tensors)
