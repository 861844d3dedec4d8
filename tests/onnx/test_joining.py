"""Products of one value by several weights: one product, whose parts are what there was before."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from cudnn_actor import spawn
from cudnn_actor.models.source import values_of
from cudnn_actor.onnx import OnnxModel

from ..in_one_test import cases_in_one_test
from ..whole import some
from .importing import check, imported, kinds, run
from .small_models import FLOAT, Dims, model_of, node

BFLOAT16 = TensorProto.BFLOAT16
rng = np.random.default_rng(31)
N, K = 6, 8


def weights(**dims: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: rng.standard_normal(each).astype("f4") for name, each in dims.items()}


def model(
    nodes: list[onnx.NodeProto], tensors: dict[str, np.ndarray], *outputs: str, code: int = FLOAT
) -> onnx.ModelProto:
    dtype = ml_dtypes.bfloat16 if code == BFLOAT16 else np.float32
    results: dict[str, tuple[int, Dims]] = dict.fromkeys(outputs, (code, None))
    given = {name: each.astype(dtype) if each.dtype == np.float32 else each for name, each in tensors.items()}
    return model_of(nodes, {"x": (code, [2, N, K])}, results, given)


HEADS = {"heads": np.array([2, N, -1, 2])}


def in_heads(x: str, y: str) -> list[onnx.NodeProto]:
    """Features as heads of two, squared."""
    return [node("Reshape", f"{x} heads", f"{y}_heads"), node("Mul", f"{y}_heads {y}_heads", y)]


def products(*nodes: onnx.NodeProto, **more: tuple[int, ...]) -> onnx.ModelProto:
    """Queries and keys, with biases, of different sizes, in heads."""
    each = [
        node("MatMul", "x wq", "mq"),
        node("Add", "mq bq", "q"),
        node("MatMul", "x wk", "mk"),
        node("Add", "bk mk", "k"),
    ]
    return model(
        [*each, *nodes, *in_heads("q", "y"), *in_heads("k", "z")],
        weights(wq=(K, 8), bq=(8,), wk=(K, 4), bk=(4,), **more) | HEADS,
        "y",
        "z",
    )


def multiplied(proto: onnx.ModelProto, **options: Any) -> list[tuple[int, ...]]:
    """The dims of each product's result."""
    source = OnnxModel(proto, **options)
    specs: Any = {each.name: each.spec for each in source.inputs}
    graph = source.specialise(specs, {}).graph
    assert graph is not None
    return [graph.body.tensor(each.y).dims for each in graph.body.operations if each.kind == "matmul"]  # type: ignore[attr-defined]


def compared(proto: onnx.ModelProto) -> None:
    check(proto, x=rng.standard_normal((2, N, K)).astype("f4"))


def gated() -> onnx.ModelProto:
    nodes = [
        node("MatMul", "x wg", "gate"),
        node("Sigmoid", "gate", "s"),
        node("Mul", "gate s", "silu"),
        node("MatMul", "x wu", "up"),
        node("Mul", "silu up", "y"),
    ]
    return model(nodes, weights(wg=(K, 16), wu=(K, 16)), "y")


def turned() -> onnx.ModelProto:
    nodes = [
        node("Reshape", "x rows", "r"),
        node("Gemm", "r wa ba", "a", transB=1),
        node("Gemm", "r wb bb", "b", transB=1),
        *in_heads("a", "y"),
        *in_heads("b", "z"),
    ]
    tensors = weights(wa=(4, K), ba=(4,), wb=(12, K), bb=(12,)) | HEADS | {"rows": np.array([2 * N, K])}
    return model(nodes, tensors, "y", "z")


def heads() -> onnx.ModelProto:
    """As the exporter writes attention's heads."""
    nodes = []
    for name in "qkv":
        nodes += [
            node("MatMul", f"x w{name}", f"m{name}"),
            node("Add", f"m{name} b{name}", f"s{name}"),
            node("Reshape", f"s{name} dims", f"r{name}"),
            node("Transpose", f"r{name}", f"h{name}", perm=[0, 2, 1, 3]),
        ]
    scores = [
        node("Transpose", "hk", "kt", perm=[0, 1, 3, 2]),
        node("MatMul", "hq kt", "scores"),
        node("Softmax", "scores", "p", axis=-1),
        node("MatMul", "p hv", "y"),
    ]
    tensors = weights(**{f"w{n}": (K, K) for n in "qkv"}, **{f"b{n}": (K,) for n in "qkv"})
    return model([*nodes, *scores], tensors | {"dims": np.array([2, N, 2, 4])}, "y")


JOINED = {
    "with biases": (products(), [(2, N, 12)]),
    "gated": (gated(), [(2, N, 32)]),
    "turned": (turned(), [(2 * N, 16)]),
    "heads": (heads(), [(2, N, 24), (2, 2, N, N), (2, 2, N, 4)]),
}


@pytest.mark.parametrize("name", JOINED)
def test_products_of_one_value_by_weights_are_joined(name: str) -> None:
    proto, dims = JOINED[name]
    assert multiplied(proto) == dims
    compared(proto)


def other(*nodes: onnx.NodeProto, outputs: str = "y z", **more: tuple[int, ...]) -> onnx.ModelProto:
    return model([*nodes], weights(**more) | HEADS, *outputs.split())


ALONE = {
    "of different values": other(
        node("Relu", "x", "x1"),
        *(node("MatMul", "x wa", "a"), *in_heads("a", "y")),
        *(node("MatMul", "x1 wb", "b"), *in_heads("b", "z")),
        wa=(K, 4),
        wb=(K, 4),
    ),
    "a result": other(
        node("MatMul", "x wa", "y"), node("MatMul", "x wb", "b"), *in_heads("b", "z"), wa=(K, 4), wb=(K, 4)
    ),
    "a weight that is read twice": other(
        *(node("MatMul", "x wa", "a"), *in_heads("a", "y")),
        *(node("MatMul", "x wb", "b"), node("MatMul", "b wb", "z")),
        wa=(K, 4),
        wb=(K, K),
    ),
    "parts that begin anywhere": other(
        *(node("MatMul", "x wa", "a"), *in_heads("a", "y")),
        *(node("MatMul", "x wb", "b"), *in_heads("b", "z")),
        wa=(K, 6),
        wb=(K, 4),
    ),
    "functions of each alone": other(
        *(node("MatMul", "x wa", "a"), node("Relu", "a", "y")),
        *(node("MatMul", "x wb", "b"), node("Neg", "b", "z")),
        wa=(K, 4),
        wb=(K, 4),
    ),
    "rows that do not stay rows": other(
        *(node("MatMul", "x wa", "a"), node("Transpose", "a", "t", perm=[0, 2, 1]), node("Relu", "t", "y")),
        *(node("MatMul", "x wb", "b"), *in_heads("b", "z")),
        wa=(K, 4),
        wb=(K, 4),
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_products_that_may_not_be_joined_stay_apart(name: str) -> None:
    proto = ALONE[name]
    assert len(multiplied(proto)) == sum(each.op_type == "MatMul" for each in proto.graph.node)
    compared(proto)


def test_joined_products_of_half_types_are_rounded_as_onnx_rounds_them() -> None:
    nodes = [
        node("MatMul", "x wg", "gate"),
        node("MatMul", "x wu", "up"),
        node("Mul", "gate up", "y"),
    ]
    proto = model(nodes, weights(wg=(K, 16), wu=(K, 16)), "y", code=BFLOAT16)
    body = imported(proto).graph.body
    assert kinds(imported(proto)) == ["matmul", "slice", "slice", "mul"]
    assert {body.tensor(uid).dtype.value for each in body.operations for uid in each.writes} == {"bfloat16"}
    assert multiplied(proto) == [(2, N, 32)]


def test_weights_are_side_by_side_only_when_they_are_uploaded() -> None:
    proto = products()
    ((_, weight), (_, bias)) = imported(proto).weights.values()
    assert callable(weight)
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in proto.graph.initializer}
    wanted = np.concatenate([tensors["wq"], tensors["wk"]], 1)
    np.testing.assert_array_equal(values_of(weight), wanted)
    np.testing.assert_array_equal(values_of(bias), np.concatenate([tensors["bq"], tensors["bk"]]))


def test_one_of_joined_weights_is_overwritten() -> None:
    proto = products()
    x, new = rng.standard_normal((2, N, K)).astype("f4"), weights(wk=(K, 4), bq=(8,))

    async def results() -> list[dict[str, np.ndarray]]:
        async with spawn(device="cpu") as gpu:
            model = await gpu.load(proto, swappable=True)
            before = await gpu.run(model, x=x)
            await model.write(new)
            after = await gpu.run(model, x=x)
            assert {"wq", "bq", "wk", "bk"} <= {*model.weights}
            return [{name: np.array(each) for name, each in found.items()} for found in (before, after)]

    assert multiplied(proto, swappable=True) == [(2, N, 12)]
    before, after = asyncio.run(results())
    of = {each.name: onnx.numpy_helper.to_array(each) for each in proto.graph.initializer}
    for found, tensors in ((before, of), (after, of | new)):
        q = x @ tensors["wq"] + tensors["bq"]
        k = x @ tensors["wk"] + tensors["bk"]
        for name, wanted in (("y", q), ("z", k)):
            heads = (wanted * wanted).reshape(2, N, -1, 2)
            np.testing.assert_allclose(found[name], heads, rtol=1e-4, atol=1e-5)


READERS = {
    "heads": ["Reshape {r} heads {y}h", "Mul {y}h {y}h {y}"],
    "function": ["Relu {r} {y}"],
    "gate": ["Sigmoid {r} {y}s", "Mul {r} {y}s {y}"],
    "with another": ["Mul {r} {o} {y}m", "Neg {y}m {y}"],
    "product": ["Transpose {r} {y}t", "MatMul {y}t {r} {y}"],
    "itself": ["Identity {r} {y}"],
    "twice": ["Reshape {r} heads {y}h", "Exp {r} {y}e", "ReduceSum {y}h {y}s", "Add {y}e {y}s {y}"],
}


def drawn(seed: int) -> onnx.ModelProto:
    """A model of some products, most of them of one value, and of what reads them."""
    rng = np.random.default_rng(seed)
    nodes = [node("Relu", "x", "x1"), node("Reshape", "x rows", "x2")]
    tensors = HEADS | {"rows": np.array([2 * N, K])}
    last: dict[int, str] = {}
    results = []
    flat = rng.random() < 0.3
    for n in range(rng.integers(2, 6)):
        size, y = int(rng.choice([4, 8, 12, 8, 6], p=[0.3, 0.3, 0.2, 0.15, 0.05])), f"y{n}"
        weight, result = f"w{n}", f"r{n}"
        if flat:
            turned = rng.random() < 0.8
            tensors |= weights(**{weight: (size, K) if turned else (K, size), f"b{n}": (size,)})
            nodes.append(node("Gemm", f"x2 {weight} b{n}", result, transB=int(turned)))
        else:
            if n and rng.random() < 0.1:
                weight = "w0"
                size = tensors["w0"].shape[1]
            else:
                tensors |= weights(**{weight: (K, size)})
            nodes.append(node("MatMul", f"{rng.choice(['x', 'x', 'x', 'x1'])} {weight}", result))
            if rng.random() < 0.5:
                tensors |= weights(**{f"b{n}": (size,)})
                nodes.append(node("Add", " ".join(rng.permutation([result, f"b{n}"])), f"s{n}"))
                result = f"s{n}"
        reader = str(rng.choice([*READERS], p=[0.35, 0.1, 0.2, 0.1, 0.1, 0.05, 0.1]))
        for each in READERS[reader]:
            op, *names = each.format(r=result, o=last.get(size, result), y=y).split()
            nodes.append(node(op, " ".join(names[:-1]), names[-1], **_options(op, flat)))
        last[size] = result
        results.append(y)
    return model(nodes, tensors, *results)


def _options(op: str, flat: bool) -> dict[str, Any]:
    return {"Transpose": {"perm": [1, 0] if flat else [0, 2, 1]}}.get(op, {})


@cases_in_one_test
@pytest.mark.parametrize("seed", range(some(60)))
def test_drawn_models_compute_the_same(seed: int) -> None:
    proto, x = drawn(seed), rng.standard_normal((2, N, K)).astype("f4")
    for got, wanted in zip(run(proto, x=x), ReferenceEvaluator(proto).run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_products_of_drawn_models_are_joined() -> None:
    fewer, count = 0, some(60)
    for seed in range(count):
        proto = drawn(seed)
        fewer += len(multiplied(proto)) < sum(each.op_type in ("MatMul", "Gemm") for each in proto.graph.node)
    assert fewer > count // 4


def test_weights_whose_names_look_like_those_of_several_stay_their_own() -> None:
    """Each pair of names is the same text once it is joined with what keys of weights are joined with."""
    pairs = {"x": ("a", "b; initialiser c"), "w": ("a; initialiser b", "c")}
    nodes = []
    for value, pair in pairs.items():
        parts = [f"{value}0", f"{value}1"]
        nodes += [
            onnx.helper.make_node("MatMul", [value, name], [part])
            for name, part in zip(pair, parts, strict=True)
        ]
        nodes.append(node("Mul", " ".join(parts), f"y{value}"))
    tensors = {name: rng.standard_normal((K, 4)).astype("f4") for pair in pairs.values() for name in pair}
    given: Any = dict.fromkeys(pairs, (FLOAT, [2, N, K]))
    proto = model_of(nodes, given, {"yx": (FLOAT, None), "yw": (FLOAT, None)}, tensors)
    assert multiplied(proto) == [(2, N, 8), (2, N, 8)]
    check(proto, **{value: rng.standard_normal((2, N, K)).astype("f4") for value in pairs})


def test_products_behind_which_there_are_many_movements_are_joined() -> None:
    """As many as a call in a call for each would be too deep for."""
    nodes, count = [], 600
    for name in "gu":
        nodes += [node("MatMul", f"x w{name}", f"m{name}"), node("Reshape", f"m{name} rows", f"{name}0")]
        for number in range(count):
            nodes += [
                node("Transpose", f"{name}{number}", f"{name}{number}t", perm=[1, 0]),
                node("Reshape", f"{name}{number}t rows", f"{name}{number + 1}"),
            ]
        nodes.append(node("Sigmoid", f"{name}{count}", f"{name}s"))
    proto = model([*nodes, node("Mul", "gs us", "y")], weights(wg=(K, 16), wu=(K, 16)), "y", code=BFLOAT16)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2 * N, 16]), "rows"))
    assert multiplied(proto) == [(2, N, 32)]
