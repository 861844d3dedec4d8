"""`compute_dtype`: functions of float32 and half types that compute in float64, on each engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    BatchNormTraining,
    ConvolutionBackwardData,
    ConvSpec,
    DType,
    GraphBuilder,
    InvalidRequest,
    LayerNorm,
    Tensor,
)

from ...in_one_test import cases_in_one_test
from ..problems import normal
from ..workbench import Workbench

Make = Callable[..., Tensor]
LONG = {"a": (7, 3000), "b": (3000, 5)}
IMAGES = {"x": (2, 40, 6, 7), "w": (8, 40, 3, 3), "bias": (8,)}
SPEC = ConvSpec.symmetric(2)


def convolved(xp: Any, x: Any, w: Any, bias: Any) -> Any:
    view = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    return xp.einsum("nchwij,kcij->nkhw", view, w) + bias[:, None, None]


CASES: dict[str, tuple[Mapping[str, tuple[int, ...]], Make, Callable[..., Any]]] = {
    "matmul": (LONG, lambda g, a, b, **of: g.matmul(a, b, **of), lambda a, b: a @ b),
    "rows": ({"a": (3000,), "b": (3000, 5)}, lambda g, a, b, **of: g.matmul(a, b, **of), lambda a, b: a @ b),
    "sum": ({"x": (9, 3000)}, lambda g, x, **of: g.sum(x, 1, **of), lambda x: x.sum(1)),
    "mean": ({"x": (9, 3000)}, lambda g, x, **of: g.mean(x, 1, **of), lambda x: x.mean(1)),
    "sum of a tensor": ({"x": (9, 3000)}, lambda g, x, **of: x.sum(1, **of), lambda x: x.sum(1)),
    "mean of a tensor": ({"x": (9, 3000)}, lambda g, x, **of: x.mean(1, **of), lambda x: x.mean(1)),
    "prod": ({"x": (60, 30)}, lambda g, x, **of: g.prod(x, 1, **of), lambda x: x.prod(1)),
    "logsumexp": (
        {"x": (40, 300)},
        lambda g, x, **of: g.logsumexp(x, 1, **of),
        lambda x: np.log(np.exp(x).sum(1)),
    ),
    "reduce": (
        {"x": (9, 3000)},
        lambda g, x, **of: g.reduce("l2", x, 1, **of),
        lambda x: (x**2).sum(1) ** 0.5,
    ),
    "of elements": (
        {"x": (50, 40)},
        lambda g, x, **of: g.pointwise("mul", x, 0.1, alphas=(0.3, 1), **of),
        lambda x: x * 0.3 * 0.1,
    ),
    "conv": (
        IMAGES,
        lambda g, x, w, bias, **of: g.conv(x, w, bias=bias, **of),
        lambda x, w, bias: convolved(np, x, w, bias),
    ),
    "conv_transpose": (
        {"x": (2, 40, 4, 5), "w": (40, 8, 1, 1), "bias": (8,)},
        lambda g, x, w, bias, **of: g.conv_transpose(x, w, bias=bias, **of),
        lambda x, w, bias: np.einsum("nchw,ckij->nkhw", x, w) + bias[:, None, None],
    ),
    "an operation": (
        {"x": (30, 200)},
        lambda g, x, **of: g.apply(LayerNorm(x=x, epsilon=1e-5), **of),
        lambda x: (x - x.mean(1, keepdims=True)) / (x.var(1, keepdims=True) + 1e-5) ** 0.5,
    ),
    "an operation whose result is like another": (
        {"x": (2, 40, 4, 5), "w": (40, 8, 1, 1)},
        lambda g, x, w, **of: g.apply(
            ConvolutionBackwardData(dy=x, w=w, conv=SPEC),
            like={"dx": g.full((2, 8, 4, 5), 0.0, x.dtype)},
            **of,
        ),
        lambda x, w: np.einsum("nchw,ckij->nkhw", x, w),
    ),
}


def run(bench: Workbench, make: Make, values: dict[str, np.ndarray]) -> np.ndarray:
    g = GraphBuilder()
    graph = g.build(y=make(g, **{name: g.input(name, x.shape, x.dtype) for name, x in values.items()}))
    named = ((port.uid, values[port.name]) for port in graph.inputs)
    found = bench.run_graph(graph.body, {uid: x for uid, x in named if uid is not None})
    (y,) = found.values()
    return y


def drawn(dims: Mapping[str, tuple[int, ...]], dtype: DType) -> dict[str, np.ndarray]:
    return {name: np.asarray(normal(of, dtype, n)) for n, (name, of) in enumerate(dims.items())}


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", CASES)
def test_float64_is_rounded_once(bench: Workbench, name: str, dtype: DType) -> None:
    dims, make, meaning = CASES[name]
    values = drawn(dims, dtype)
    wanted = meaning(*(x.astype(np.float64) for x in values.values())).astype(dtype.numpy)
    got = run(bench, lambda g, **of: make(g, **of, compute_dtype="float64"), values)
    assert got.dtype == dtype.numpy
    np.testing.assert_array_equal(got, wanted)


def test_operands_are_read_as_they_are_stored(bench: Workbench) -> None:
    values = drawn({"a": (8, 50), "b": (50, 8)}, DType.FLOAT16)
    half = (values["a"].astype(np.float32) * np.float32(0.1)).astype(np.float16).astype(np.float64)
    got = run(bench, lambda g, a, b: g.matmul(a * 0.1, b, compute_dtype="float64"), values)
    np.testing.assert_array_equal(got, (half @ values["b"].astype(np.float64)).astype(np.float16))


def test_the_result_has_its_dtype_where_a_function_of_elements_reads_it(bench: Workbench) -> None:
    x = np.linspace(1, 2, 100, dtype=np.float32)
    got = run(bench, lambda g, x: g.pointwise("mul", x, 0.1, compute_dtype="float64") - x * 0.1, {"x": x})
    np.testing.assert_array_equal(got, (x.astype(np.float64) * 0.1).astype(np.float32) - x * np.float32(0.1))


def test_only_what_is_computed_is_added() -> None:
    g = GraphBuilder()
    a = g.input("a", (4, 4))
    g.matmul(a, a, compute_dtype="float64")
    assert g.added == 4  # two operands are converted, and the result


def test_gradients_are_computed_in_the_type_of_the_function(bench: Workbench) -> None:
    values = drawn({"a": (3, 5), "b": (5, 3000), "dy": (3, 3000)}, DType.FLOAT32)

    def gradient(g: GraphBuilder, a: Tensor, b: Tensor, dy: Tensor) -> Tensor:
        return g.grad(g.matmul(a, b, compute_dtype="float64"), a, dy)

    wanted = values["dy"].astype(np.float64) @ values["b"].astype(np.float64).T
    np.testing.assert_array_equal(run(bench, gradient, values), wanted.astype(np.float32))


def test_several_results_have_the_dtypes_that_they_have_without() -> None:
    for dtype in (DType.FLOAT16, DType.FLOAT32):
        g = GraphBuilder()
        x, running = g.input("x", (4, 3, 2, 2), dtype), g.input("running", (3,))
        norm = BatchNormTraining(x=x, running_mean=running, running_variance=running)
        usual, wide = (
            g.apply(norm, also=("mean", "new_running_mean"), compute_dtype=of) for of in (None, "float64")
        )
        assert [y.dtype for y in wide] == [y.dtype for y in usual]
        assert type(wide)._fields == type(usual)._fields


@pytest.mark.parametrize(
    ("dtype", "usual"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_the_type_that_is_computed_in_anyway_changes_nothing(dtype: Any, usual: Any) -> None:
    def graph(**of: Any) -> Any:
        g = GraphBuilder()
        a, b = g.input("a", (4, 6), dtype), g.input("b", (6, 5), dtype)
        return g.build(y=g.sum(g.pointwise("relu", g.matmul(a, b, **of), **of), 0, **of))

    assert graph(compute_dtype=usual).digest() == graph().digest()
    assert graph(compute_dtype=np.dtype(usual)).digest() == graph().digest()


@pytest.mark.parametrize(
    ("dtype", "wanted", "text"),
    [
        *(
            (
                dtype,
                half,
                f"{half}: is not a type that {dtype} is computed in, which is float32; leave it out, or",
            )
            for dtype in ("float16", "float32")
            for half in ("float16", "bfloat16")
        ),
        (
            "float64",
            "float32",
            "float32: is not a type that float64 is computed in, which is float64; leave it out, or convert "
            'the operands, as in g.astype(x, "float32")',
        ),
        (
            "float32",
            "int32",
            "int32: is not a type that float32 is computed in, which is float32; leave it o",
        ),
        (
            "int8",
            "int32",
            "int32: is given, but no operand is of floats; leave it out: integers are computed",
        ),
        (
            "float32",
            "float8",
            "'float8': is not a type that floats are computed in; pass float32 or float64, ",
        ),
        (
            "float32",
            3,
            "3: is not a type that floats are computed in; pass float32 or float64, or leave it o",
        ),
    ],
)
def test_a_type_that_nothing_computes_in_is_refused(dtype: Any, wanted: Any, text: str) -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 4), dtype)
    for function in (g.matmul, lambda *of, **options: g.pointwise("max", *of, **options)):
        with pytest.raises(InvalidRequest) as caught:
            function(x, x, compute_dtype=wanted)
        assert str(caught.value).startswith(f"compute_dtype={text}")
    assert g.added == 0


def test_operands_that_do_not_fit_together_are_refused_as_they_are_without() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (1, 2, 4, 4)), g.input("w", (2, 2, 3, 3), "float16")
    texts = []
    for options in (dict[str, Any](), {"compute_dtype": "float64"}):
        with pytest.raises(InvalidRequest) as caught:
            g.conv(x, w, **options)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
