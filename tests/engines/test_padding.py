"""Padding against NumPy's, and element by element; what is refused; and the kernels that it is on CUDA."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.engines.cuda.plans.kernels import Constant, Leaf
from cudnn_actor.engines.cuda.plans.recipe import Buffer, KernelStep
from cudnn_actor.engines.cuda.plans.splitting import compile_split
from cudnn_actor.protocol import DType, Graph, GraphBuilder, InvalidRequest, Layout, Pad, TensorSpec

from .differences import computed
from .workbench import Workbench, spread

VALUE = 2.0


def integers(dims: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Different numbers, as far as the dtype has them."""
    return np.arange(math.prod(dims)).reshape(dims).astype(dtype.numpy)


def padded(x: np.ndarray, before: Any, after: Any, steps: Any) -> np.ndarray:
    """Each element put where it belongs."""
    dims = [b + (n - 1) * abs(s) + 1 + a for b, n, s, a in zip(before, x.shape, steps, after, strict=True)]
    y = np.full(dims, VALUE, x.dtype)
    for place in itertools.product(*map(range, x.shape)):
        along = zip(place, before, x.shape, steps, strict=True)
        y[tuple(b + (i * s if s > 0 else (n - 1 - i) * -s) for i, b, n, s in along)] = x[place]
    return y


@st.composite
def problems(draw: st.DrawFn) -> tuple[TensorSpec, dict[str, tuple[int, ...]]]:
    rank = draw(st.integers(0, 4))
    dims = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    layout = Layout.NHWC if rank in (3, 4) and draw(st.booleans()) else Layout.NCHW
    spec = TensorSpec.packed(dims, DType.FLOAT32, layout)
    some = st.lists(st.integers(0, 3), min_size=rank, max_size=rank).map(tuple)
    steps = st.lists(st.sampled_from([1, 1, -1, 2, -3]), min_size=rank, max_size=rank).map(tuple)
    attributes = {"before": draw(some), "after": draw(some), "steps": draw(steps)}
    return spec, attributes


def graph_of(spec: TensorSpec, attributes: dict[str, Any]) -> Graph:
    g = GraphBuilder()
    x = g.input("x", spec.dims, spec.dtype, layout=spec.layout)
    return g.build(y=g.apply(Pad(x=x, **attributes, value=VALUE)))


@given(problems())
def test_each_element_is_where_it_belongs(problem: tuple[TensorSpec, dict[str, Any]]) -> None:
    spec, attributes = problem
    x = integers(spec.dims, spec.dtype)
    np.testing.assert_array_equal(
        computed(graph_of(spec, attributes), {"x": x})["y"], padded(x, **attributes)
    )


@given(problems())
def test_the_kernels_of_cuda_put_each_element_where_it_belongs(
    problem: tuple[TensorSpec, dict[str, Any]],
) -> None:
    spec, attributes = problem
    graph = graph_of(spec, attributes)
    x, y = integers(spec.dims, spec.dtype), np.full(graph.outputs[0].spec.size, np.nan, np.float32)
    given_ = np.empty(spec.size, np.float32)
    strided(given_, spec.dims, spec.strides)[...] = x
    memories = {graph.body.bound.index(graph.inputs[0].uid): given_}
    memories[1 - next(iter(memories))] = y
    for step in compile_split(graph.body, None, None).recipe.steps:
        assert isinstance(step, KernelStep)
        run(step, memories)
    out = graph.outputs[0].spec
    np.testing.assert_array_equal(strided(y, out.dims, out.strides), padded(x, **attributes))


def run(step: KernelStep, memories: dict[int, np.ndarray]) -> None:
    """A kernel that copies a tensor, or fills it with a number."""
    places = []
    for source in step.sources:
        assert isinstance(source, Buffer)
        places.append((source.number, source.offset // 4))
    kernel, (result,) = step.kernel, step.kernel.results
    for index in itertools.product(*map(range, kernel.dims)):
        at = [
            first + sum(map(math.prod, zip(index, strides, strict=True)))
            for (_, first), strides in zip(places, kernel.strides, strict=True)
        ]
        assert min(at) >= 0
        if isinstance(result.value, Constant):
            memories[places[0][0]][at[0]] = result.value.value
        else:
            assert isinstance(result.value, Leaf)
            memories[places[0][0]][at[0]] = memories[places[1][0]][at[1]]


def strided(memory: np.ndarray, dims: Any, strides: Any) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(memory, dims, [4 * step for step in strides])


@pytest.mark.parametrize("dtype", DType)
def test_every_dtype_is_numpys(bench: Workbench, dtype: DType) -> None:
    dims, value = (2, 3, 4), 1.0
    x = integers(dims, dtype)
    wanted = np.pad(x.astype(np.float64), [(1, 2), (0, 0), (3, 1)], constant_values=value)
    y = bench.empty(TensorSpec.packed(wanted.shape, dtype))
    operation = Pad(
        x=bench.place(x, spread(dims, dtype)),
        y=y,
        before=(1, 0, 3),
        after=(2, 0, 1),
        steps=(1, 1, 1),
        value=value,
    )
    np.testing.assert_array_equal(bench.run(operation).astype(np.float64), wanted)


def test_the_builders_function_is_numpys() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    graph = g.build(all=g.pad(x, 1, value=5), some=g.pad(x, [(0, 2), (1, 0)]))
    given_ = integers((2, 3), DType.FLOAT32)
    found = computed(graph, {"x": given_})
    np.testing.assert_array_equal(found["all"], np.pad(given_, 1, constant_values=5))
    np.testing.assert_array_equal(found["some"], np.pad(given_, [(0, 2), (1, 0)]))
    with pytest.raises(InvalidRequest, match="widths"):
        g.pad(x, [(1,), (2, 3)])


@pytest.mark.parametrize(
    ("field", "value", "dtype"),
    [
        ("before", (0, -1), "float32"),
        ("after", (-1, 0), "float32"),
        ("before", (0,), "float32"),
        ("steps", (1, 0), "float32"),
        ("steps", (1, 1, 1), "float32"),
        ("value", math.inf, "float32"),
        ("value", math.nan, "float64"),
        ("value", 0.5, "int32"),
        ("value", 128.0, "int8"),
        ("value", -1.0, "uint64"),
        ("value", 2.0, "bool"),
    ],
)
def test_what_does_not_fit_is_refused(field: str, value: Any, dtype: Any) -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3), dtype)
    given_: dict[str, Any] = {"before": (0, 0), "after": (1, 1), "steps": (1, 1), field: value}
    with pytest.raises(InvalidRequest) as caught:
        g.apply(Pad(x=x, **given_))
    assert caught.value.field == field
