"""The page for those who come from cuDNN's older API: each of its functions computes what NumPy does."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor import CudnnRef, Graph, GraphBuilder, Layout, TensorSpec, spawn
from cudnn_actor.operations import ReductionMode

from ..counterparts.names import unknown_names
from .cudnn_in_numpy import (
    Arrays,
    affine_grid,
    avg_pool,
    batch_norm,
    batch_norm_gradients,
    blend,
    clipped_lstm_step,
    conv,
    deep_image,
    divisive,
    divisive_of_deviations,
    folded,
    gradient,
    gradients,
    grid_sample,
    kept,
    lrn,
    max_pool,
    norm_add_relu,
    normal,
    of_channels,
    recurrent,
    relu,
    sigmoid,
    softmax,
    trained,
    windows,
)
from .test_readme import printed, programs

PAGE = Path(__file__).parents[2] / "docs" / "cudnn.md"
WHOLE, *PARTS = programs(PAGE)


def shown() -> dict[str, Callable[..., Any]]:
    """The functions of the page by their names."""
    names: dict[str, Any] = {}
    for part in PARTS:
        exec(compile(part, str(PAGE), "exec"), names)
    ours = (of for of in names.values() if inspect.isfunction(of) and of.__code__.co_filename == str(PAGE))
    return {of.__name__: of for of in ours}


class Case(NamedTuple):
    """A function of the page, arrays and other arguments for it, and what NumPy makes of all those arrays."""

    name: str
    arrays: Arrays
    wanted: Callable[..., Arrays]
    others: tuple[tuple[str, Any], ...] = ()


IMAGE = {"x": normal(2, 3, 5, 4)}
OLD = {"alpha": 2.0, "beta": 0.5}
BLENDS = tuple(OLD.items())
SCALES = {"scale": normal(3, seed=1), "bias": normal(3, seed=2)}
RUNNING = {"running_mean": normal(3, seed=3), "running_variance": np.abs(normal(3, seed=4))}
X, Y, DY = IMAGE["x"], normal(2, 3, 5, 4, seed=5), normal(2, 3, 5, 4, seed=6)
STEPS = {"x": normal(4, 2, 3), "h0": normal(1, 2, 5), "w_ih": normal(5, 3), "w_hh": normal(5, 5) * 0.5}
BIASES = {"b_ih": normal(5, seed=1), "b_hh": normal(5, seed=2)}
CELL = {
    "x": normal(2, 3),
    "h": normal(2, 5),
    "c": normal(2, 5, seed=3),
    "w_ih": normal(20, 3),
    "w_hh": normal(20, 5),
    "b": normal(20),
}
MEANS = normal(2, 3, 5, 4, seed=7)
POOLED = {"dy": normal(2, 3, 3, 2)}
LAYER = {"x": X, "w": normal(4, 3, 3, 3), "bias": normal(4)}
THETA, GRID = normal(2, 2, 3), normal(2, 3, 3, 2) * 0.8
STATE = np.array([20, 6])
TERMS = {"a": normal(1, 3, 5, 1), "b": normal(2, 1, 5, 4), "c": normal(2, 3, 5, 4)}
BINARY = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
REDUCTIONS: dict[ReductionMode, Callable[..., Any]] = {
    ReductionMode.SUM: np.sum,
    ReductionMode.PRODUCT: np.prod,
    ReductionMode.MIN: np.min,
    ReductionMode.MAX: np.max,
    ReductionMode.ABSOLUTE_MAX: lambda x, axes, **options: np.max(abs(x), axes, **options),
    ReductionMode.MEAN: np.mean,
    ReductionMode.L1: lambda x, axes, **options: np.sum(abs(x), axes, **options),
    ReductionMode.L2: lambda x, axes, **options: np.sqrt(np.sum(x**2, axes, **options)),
}
ACTIVATIONS: list[tuple[str, dict[str, float], Callable[[Any], Any]]] = [
    ("sigmoid", {}, sigmoid),
    ("relu", {}, relu),
    ("relu", {"upper": 0.5}, lambda x: np.clip(x, 0, 0.5)),
    ("tanh", {}, np.tanh),
    ("elu", {"parameter": 0.5}, lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
    ("identity", {}, np.asarray),
    ("swish", {"parameter": 1.5}, lambda x: x * sigmoid(1.5 * x)),
]


def elementwise() -> list[Case]:
    factors = (("alpha1", 2.0), ("alpha2", -3.0), ("beta", 0.5))
    a, c = {"a": TERMS["a"]}, {"c": TERMS["c"]}
    return [
        *(
            Case(
                "op_tensor",
                TERMS,
                lambda a, b, c, of=of: {"c": of(2.0 * a, -3.0 * b) + 0.5 * c},
                (("op", op), *factors),
            )
            for op, of in BINARY.items()
        ),
        Case(
            "op_tensor_sqrt",
            {"a": abs(TERMS["a"]), **c},
            lambda a, c: {"c": np.sqrt(2.0 * a) + 0.5 * c},
            (factors[0], factors[2]),
        ),
        Case(
            "op_tensor_not",
            {"a": np.array([[0, 1, 0]], np.float32), "c": normal(2, 3)},
            lambda a, c: {"c": 1 - a + 0.5 * c},
            factors[2:],
        ),
        Case("add_tensor", {**a, **c}, blend("c", lambda a, c: a, **OLD), BLENDS),
        Case("scale_tensor", {"y": Y}, lambda y: {"y": 2.0 * y}, BLENDS[:1]),
        Case("set_tensor", {}, lambda: {"y": np.full((2, 3), 7)}, (("dims", (2, 3)), ("value", 7))),
    ]


def layouts() -> list[Case]:
    widths = ((0, 0), (0, 5), (1, 0), (2, 1))
    before, after = zip(*widths, strict=True)
    block = (("rows", 2), ("columns", 3))
    deep = normal(2, 12, 2, 5)
    return [
        Case("transform_tensor", {"x": X, "y": Y}, blend("y", lambda x, y: x, **OLD), BLENDS),
        Case("transform_to_channels_last", IMAGE, lambda x: {"y": x}),
        Case(
            "transform_with_padding",
            IMAGE,
            lambda x: {"y": np.pad(x, widths)},
            (("before", before), ("after", after)),
        ),
        Case("transform_fold", {"x": normal(2, 2, 4, 6)}, lambda x: {"y": folded(x, 2, 3)}, block),
        Case(
            "transform_unfold",
            {"x": folded(deep_image(deep), 2, 3)},
            lambda x: {"y": deep_image(deep)},
            block,
        ),
    ]


def reductions() -> list[Case]:
    axes = (0, 2)
    zeros = np.where(abs(X) < 0.3, 0, X)

    def reduced(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, c: of(x, axes, keepdims=True)

    def indices(x: Any) -> Arrays:
        rows = x.reshape(2, 3, -1)
        return {"largest": rows.argmax(2), "smallest": rows.argmin(2), "magnitude": abs(rows).argmax(2)}

    return [
        *(
            Case(
                "reduce_tensor",
                {"x": X, "c": normal(1, 3, 1, 4)},
                blend("c", reduced(of), **OLD),
                (("mode", mode), ("axes", axes), *BLENDS),
            )
            for mode, of in REDUCTIONS.items()
        ),
        Case(
            "reduce_without_zeros",
            {"x": zeros},
            lambda x: {"c": np.prod(x, axes, where=x != 0, keepdims=True)},
            (("axes", axes),),
        ),
        Case("reduce_with_indices", IMAGE, indices),
    ]


def activations() -> list[Case]:
    dx = {"dx": normal(2, 3, 5, 4, seed=7)}
    probabilities = softmax(X.astype(np.float64), 1)
    logarithms = {"dy": DY, "y": np.log(probabilities).astype(np.float32)}
    cases = []
    for mode, coefficient, of in ACTIVATIONS:
        others = (("mode", mode), *BLENDS, *coefficient.items())
        forward = blend("y", lambda x, y, of=of: of(x), **OLD)
        backward = blend("dx", lambda dy, x, dx, of=of: gradient(of, x, dy), **OLD)
        cases.append(Case("activation_forward", {"x": X, "y": Y}, forward, others))
        cases.append(Case("activation_backward", {"dy": DY, "x": X, **dx}, backward, others))
    return [
        *cases,
        Case("softmax_by_channel", {"x": X, "y": Y}, blend("y", lambda x, y: softmax(x, 1), **OLD), BLENDS),
        Case("softmax_by_instance", IMAGE, lambda x: {"y": softmax(x, (1, 2, 3))}),
        Case(
            "softmax_backward",
            {"dy": DY, "y": probabilities.astype(np.float32), **dx},
            blend("dx", lambda dy, y, dx: gradient(partial(softmax, axis=1), X, dy), **OLD),
            BLENDS,
        ),
        Case(
            "log_softmax_backward",
            logarithms,
            lambda dy, y: {"dx": gradient(lambda x: np.log(softmax(x, 1)), X, dy)},
        ),
    ]


def poolings() -> list[Case]:
    old = {"y": normal(2, 3, 3, 2, seed=8)}
    both = [(("include_padding", included),) for included in (False, True)]
    return [
        Case("max_pooling", {"x": X, **old}, blend("y", lambda x, y: max_pool(x), **OLD), BLENDS),
        Case(
            "max_pooling_backward",
            {**POOLED, "x": X, "dx": Y},
            blend("dx", lambda dy, x, dx: gradient(max_pool, x, dy), **OLD),
            BLENDS,
        ),
        *(Case("average_pooling", IMAGE, lambda x, of=of: {"y": avg_pool(x, of[0][1])}, of) for of in both),
        *(
            Case(
                "average_pooling_backward",
                {**POOLED, "x": X},
                lambda dy, x, of=of: {"dx": gradient(lambda x: avg_pool(x, of[0][1]), x, dy)},
                of,
            )
            for of in both
        ),
    ]


def convolutions() -> list[Case]:
    factors = (("alpha1", 2.0), ("alpha2", -0.5))
    plain = {"x": X, "w": LAYER["w"]}
    old = normal(2, 4, 5, 4)

    def fused(x: Any, w: Any, bias: Any, z: Any) -> Any:
        return relu(2.0 * conv(x, w) - 0.5 * z + of_channels(bias))

    def columns(x: Any) -> Arrays:
        blocks = windows(x, (3, 2), 1)
        return {"columns": blocks.transpose(0, 1, 4, 5, 2, 3).reshape(2, 18, -1)}

    of_bias = blend("db", lambda dy, db: dy.sum((0, 2, 3)), **OLD)
    return [
        Case(
            "bias_activation_forward",
            {**LAYER, "z": normal(2, 4, 5, 4)},
            lambda **arrays: {"y": fused(**arrays)},
            factors,
        ),
        Case(
            "bias_activation_forward_over_y",
            {**LAYER, "y": old},
            lambda y, **arrays: {"y": fused(z=y, **arrays)},
            factors,
        ),
        Case(
            "convolution_forward",
            {**plain, "y": old},
            blend("y", lambda x, w, y: conv(x, w), **OLD),
            BLENDS,
        ),
        Case(
            "convolution_backward_data",
            {"dy": old, "w": LAYER["w"], "dx": X},
            blend("dx", lambda dy, w, dx: gradient(lambda x: conv(x, w), X, dy), **OLD),
            BLENDS,
        ),
        Case(
            "convolution_backward_filter",
            {"x": X, "dy": old, "dw": LAYER["w"]},
            blend("dw", lambda x, dy, dw: gradient(lambda w: conv(x, w), dw, dy), **OLD),
            BLENDS,
        ),
        Case("true_convolution", plain, lambda x, w: {"y": conv(x, w[:, :, ::-1, ::-1])}),
        Case("backward_bias", {"dy": normal(2, 4, 5, 4), "db": normal(4)}, of_bias, BLENDS),
        Case("backward_data_and_filter", {**plain, "dy": normal(2, 4, 5, 4)}, gradients(conv, "x", "w")),
        Case("im2col", IMAGE, columns),
    ]


def batch_norms() -> list[Case]:
    def inference(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Arrays:
        of = [of_channels(each) for each in (scale, bias, mean, variance)]
        return {"y": (x - of[2]) / np.sqrt(of[3] + 1e-4) * of[0] + of[1]}

    given = {"x": X, **SCALES}
    saved = {"mean": X.mean((0, 2, 3)), "inverse_deviation": 1 / np.sqrt(X.var((0, 2, 3)) + 1e-5)}
    old = dict(zip(("mean", "variance"), RUNNING.values(), strict=True))
    elements = {"x": X, "scale": normal(3, 5, 4), "bias": normal(3, 5, 4, seed=1)}
    return [
        Case("batch_norm_inference", {**given, **old}, inference),
        Case("batch_norm_training", {**given, **RUNNING}, trained, (("factor", 0.3),)),
        Case(
            "batch_norm_backward",
            {"dy": DY, "x": X, "scale": SCALES["scale"], **saved, "dscale": normal(3, seed=9)},
            batch_norm_gradients,
            BLENDS,
        ),
        Case("batch_norm_per_activation", elements, lambda **arrays: {"y": batch_norm(**arrays, axes=(0,))}),
        Case("batch_norm_add_relu", {**given, "z": Y}, lambda **arrays: {"y": norm_add_relu(**arrays)}),
        Case(
            "batch_norm_add_relu_backward",
            {**given, "z": Y, "dy": DY},
            gradients(norm_add_relu, "x", "z", "scale", "bias"),
        ),
    ]


def the_rest() -> list[Case]:
    places = {"x": X, "grid": GRID}
    return [
        Case("product_in_float64", {"a": normal(3, 40), "b": normal(40, 2)}, lambda a, b: {"y": a @ b}),
        Case("lrn_cross_channel", IMAGE, lambda x: {"y": lrn(x)}),
        Case("lrn_cross_channel_backward", {"dy": DY, "x": X}, gradients(lrn, "x")),
        Case("divisive_normalization", IMAGE, lambda x: {"y": divisive(x)}),
        Case("divisive_normalization_backward", {"dy": DY, "x": X}, gradients(divisive, "x")),
        Case(
            "divisive_normalization_with_means",
            {"x": X, "means": MEANS},
            lambda x, means: {"y": divisive_of_deviations(x, means)},
        ),
        Case(
            "divisive_normalization_with_means_backward",
            {"dy": DY, "x": X, "means": MEANS},
            gradients(divisive_of_deviations, "x", "means"),
        ),
        Case("dropout_forward", {"x": X, "state": STATE}, lambda x, state: {"y": x * kept(x.shape, state)}),
        Case(
            "dropout_backward",
            {"dy": DY, "state": STATE},
            lambda dy, state: {"dx": dy * kept(dy.shape, state), "state": state + np.array([0, dy.size])},
        ),
        Case("grid_generator", {"theta": THETA}, lambda theta: {"grid": affine_grid(theta)}),
        Case(
            "grid_generator_backward",
            {"theta": THETA, "dgrid": normal(2, 5, 4, 2)},
            lambda theta, dgrid: {"dtheta": gradient(affine_grid, theta, dgrid)},
        ),
        *several_heads(),
        Case(
            "rnn_forward",
            {**STEPS, **BIASES},
            lambda **of: {"y": recurrent(**of), "h_n": recurrent(**of)[-1:]},
        ),
        Case(
            "rnn_backward",
            {**STEPS, "dy": normal(4, 2, 5, seed=9)},
            gradients(recurrent, "x", "h0", "w_ih", "w_hh"),
        ),
        rnn_training(),
        Case("clipped_lstm_step", CELL, clipped_lstm_step),
        Case("sampler", places, lambda x, grid: {"y": grid_sample(x, grid)}),
        Case("sampler_backward", {**places, "dy": normal(2, 3, 3, 3)}, gradients(grid_sample, "x", "grid")),
    ]


def rnn_training() -> Case:
    """The three messages of a layer."""
    layer = {"x": STEPS["x"]} | {name: STEPS[name][None] for name in ("w_ih", "w_hh")}
    into = {name: np.zeros_like(layer[name.removeprefix("d")]) for name in ("dx", "dw_ih", "dw_hh")}
    dy = normal(4, 2, 5, seed=9)
    results = into | {"y": np.zeros_like(dy)}

    def forward(x: Any, w_ih: Any, w_hh: Any, **_: Any) -> Arrays:
        return {"y": recurrent(x=x, h0=np.zeros((1, 2, 5)), w_ih=w_ih[0], w_hh=w_hh[0])}

    def backward(dy: Any, x: Any, w_ih: Any, w_hh: Any, **_: Any) -> Arrays:
        of = {"x": x, "h0": np.zeros((1, 2, 5)), "w_ih": w_ih[0], "w_hh": w_hh[0]}
        found = gradients(recurrent, "x", "w_ih", "w_hh")(dy=dy, **of)
        return {name: each.reshape(into[name].shape) for name, each in found.items()}

    return Case("rnn_training", {"dy": dy, **layer, **results}, lambda **of: forward(**of) | backward(**of))


def several_heads() -> list[Case]:
    """Two heads of two features, queries of three positions, keys of five."""
    query, key, residual = normal(3, 2, 4), normal(5, 2, 4, seed=1), normal(3, 2, 4, seed=2)
    packed, lengths = normal(80), np.array([4, 2], np.int32)

    def forward(
        query: Any, key: Any, packed: Any, *, lengths: Any = (5, 5), before: int = 5, residual: Any = 0.0
    ) -> Any:
        of_q, of_k, of_v, out = packed[:64].reshape(4, 4, 4)
        biases = packed[64:].reshape(4, 4)
        q, k, v = query @ of_q.T + biases[0], key @ of_k.T + biases[1], key @ of_v.T + biases[2]
        q, k, v = (x.reshape(*x.shape[:2], 2, 2) for x in (q, k, v))
        scores = np.einsum("ibhd,jbhd->bhij", q, k) / math.sqrt(2)
        rows, columns = np.arange(len(query))[:, None], np.arange(len(key))
        seen = (columns >= rows - before) & (columns < np.array(lengths)[:, None, None, None])
        weights = np.where(seen, np.exp(scores), 0.0)
        weights /= weights.sum(3, keepdims=True)
        mixed = np.einsum("bhij,jbhd->ibhd", weights, v).reshape(query.shape)
        return mixed @ out.T + biases[3] + residual

    def gradients_of(query: Any, key: Any, packed: Any, dy: Any) -> Arrays:
        return {
            "dquery": gradient(lambda x: forward(x, key, packed), query, dy),
            "dkey": gradient(lambda x: forward(query, x, packed), key, dy),
            "dpacked": gradient(lambda x: forward(query, key, x), packed, dy),
        }

    arrays = {"query": query, "key": key, "packed": packed}
    return [
        Case(
            "multi_head_attn_forward",
            {**arrays, "residual": residual, "lengths": lengths},
            lambda **of: {"y": forward(before=2, **of)},
        ),
        Case("multi_head_attn_backward", {**arrays, "dy": normal(3, 2, 4, seed=3)}, gradients_of),
    ]


CASES = [
    *elementwise(),
    *layouts(),
    *reductions(),
    *activations(),
    *poolings(),
    *convolutions(),
    *batch_norms(),
    *the_rest(),
]


def test_the_whole_program_prints_what_the_page_says(tmp_path: Path) -> None:
    said = WHOLE.rstrip().rpartition("  # ")[2]
    assert printed(WHOLE, tmp_path) == f"{said}\n"


def test_what_the_page_names_is_there() -> None:
    text = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert unknown_names(text) == []


def test_every_function_of_the_page_is_compared_with_numpy() -> None:
    assert {case.name for case in CASES} == set(shown())


def test_transforms_write_the_layouts_and_dtypes_that_they_say() -> None:
    g = GraphBuilder()
    x, y = g.input("x", X.shape), g.input("y", X.shape, "float16", layout="NHWC")
    in_place = shown()["transform_tensor"](g, x, y, 1.0, 1.0)
    written = [
        in_place.body.tensor(uid) for uid in in_place.body.written if in_place.names_of.get(uid) == "y"
    ]
    assert [tensor.strides for tensor in written] == [TensorSpec.packed(X.shape, layout="NHWC").strides]
    g = GraphBuilder()
    (port,) = shown()["transform_to_channels_last"](g, g.input("x", X.shape)).outputs
    assert port.spec.layout is Layout.NHWC


async def test_the_functions_of_the_page_compute_what_numpy_does() -> None:
    """One service for all: to start one for each takes longer than they do."""
    failures = []
    async with spawn(device="cpu") as gpu:
        for case in CASES:
            try:
                await computes_what_numpy_does(gpu, case)
            except Exception as error:  # noqa: BLE001 - each is told of
                error.add_note(f"in the function {case.name}")
                failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(CASES)} functions", failures)


async def computes_what_numpy_does(gpu: CudnnRef, case: Case) -> None:
    function, wanted = shown()[case.name], case.wanted(**case.arrays)
    buffers = {name: await gpu.upload(array) for name, array in case.arrays.items()}
    if inspect.iscoroutinefunction(function):
        await function(gpu, **buffers, **dict(case.others))
    else:
        graph = graph_of(function, case)
        assert wanted.keys() == {graph.names_of.get(uid) for uid in graph.body.written} - {None}
        made = await gpu.apply(graph, buffers)
        references = made if isinstance(made, tuple) else (made,)
        buffers |= dict(zip((port.name for port in graph.outputs), references, strict=True))
    for name, array in wanted.items():
        found = await gpu.download(buffers[name])
        assert found.shape == np.shape(array)
        np.testing.assert_allclose(found, array, rtol=2e-4, atol=2e-5, err_msg=name)


def graph_of(function: Callable[..., Graph], case: Case) -> Graph:
    g = GraphBuilder()
    tensors = {name: g.input(name, array.shape, array.dtype) for name, array in case.arrays.items()}
    return function(g, **tensors, **dict(case.others))
