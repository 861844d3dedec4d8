"""Errors about the arguments of a builder's functions name these arguments, not what those become inside."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import GraphBuilder, InvalidRequest, TensorSpec

from ..in_one_test import cases_in_one_test

STATE = ("int64", (2,))
M, N, X, W, V, Q = (
    ("float32", dims) for dims in ((4, 6), (4, 6), (2, 8, 4, 4), (8, 8, 3, 3), (8,), (1, 2, 8, 16))
)
INTEGERS, LENGTHS = ("int32", (4, 6)), ("int32", (1,))


def each(functions: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(functions.split(), arguments)


LAYER = ("float32", (3, 2, 4))
WEIGHTS = {gates: [("float32", (gates * 5, size)) for size in (4, 5)] for gates in (1, 3, 4)}
RECURRENT = {"bidirectional": False, "batch_first": False, "lengths": (3, 1), "dropout": 0.5, "state": STATE}
ARGUMENTS: dict[str, dict[str, Any]] = {
    **each("add divide fmod greater logical_and maximum mod power prelu", a=M, b=M),
    **each("bitwise_and floor_divide left_shift", a=INTEGERS, b=INTEGERS),
    **each("exp sqrt isnan", x=M),
    **each("celu elu hard_sigmoid", x=M, alpha=1.0),
    **each("softplus swish", x=M, beta=1.0),
    **each("max argmax all any", x=M, axis=0, keepdims=False),
    **each("sum mean prod logsumexp", x=M, axis=0, keepdims=False, compute_dtype="float64"),
    **each("var std", x=M, axis=0, ddof=0, keepdims=False),
    **each("cumsum cumprod", x=M, axis=0, exclusive=False, reverse=False),
    **each("softmax log_softmax", x=M, axis=-1),
    **each("adaptive_avg_pool adaptive_max_pool", x=X, output=2),
    **each("depth_to_space space_to_depth", x=X, block=2, mode="DCR"),
    **each("tril triu", x=M, k=0),
    **each("concatenate stack", tensors=[M, M], axis=0),
    **each("sort argsort", x=M, axis=-1, descending=False),
    "where": {"condition": ("bool", (4, 6)), "a": M, "b": M},
    "clip": {"x": M, "lower": 0.0, "upper": 1.0},
    "relu": {"x": M, "slope": 0.1, "lower": 0.0, "upper": 6.0},
    "leaky_relu": {"x": M, "slope": 0.1},
    "gelu": {"x": M, "approximate": False},
    "advance": {"state": STATE, "count": 3},
    "arange": {"start": 0, "stop": 4, "step": 1, "dtype": "int64"},
    "array_split": {"x": M, "sections": 2, "axis": 0},
    "split": {"x": M, "sections": 2, "axis": 0},
    "astype": {"x": M, "dtype": "float16"},
    "attention": {
        **dict.fromkeys("qkv", Q),
        "bias": ("float32", (1, 1, 8, 8)),
        "lengths_q": LENGTHS,
        "lengths_kv": LENGTHS,
        "scale": 1.0,
        "causal": False,
        "window": (3, 3),
        "alibi": (1.0, 2.0),
        "dropout": 0.5,
        "state": STATE,
    },
    "avg_pool": {"x": X, "size": 2, "pad": 1, "stride": 1, "include_padding": False},
    "max_pool": {"x": X, "size": 2, "pad": 1, "stride": 1, "dilation": 1},
    "lp_pool": {"x": X, "size": 2, "p": 2.0, "pad": 0, "stride": 1, "dilation": 1},
    "global_lp_pool": {"x": X, "p": 3.0},
    "batch_norm": {
        **{"x": X, **dict.fromkeys(("mean", "variance", "scale", "bias"), V), "epsilon": 1e-5},
        "per_activation": False,
    },
    "batch_norm_training": {
        "x": X,
        **dict.fromkeys(("scale", "bias", "running_mean", "running_variance"), V),
        "epsilon": 1e-5,
        "momentum": 0.1,
        "unbiased": True,
        "per_activation": False,
    },
    "batch_norm_finalize": {
        **{"sums": V, "sums_of_squares": V, "count": 64},
        **dict.fromkeys(("scale", "bias", "running_mean", "running_variance"), V),
        **{"epsilon": 1e-5, "momentum": 0.1, "unbiased": True},
    },
    "instance_norm": {"x": X, "scale": V, "bias": V, "epsilon": 1e-5},
    "group_norm": {"x": X, "groups": 2, "scale": V, "bias": V, "epsilon": 1e-5},
    "layer_norm": {
        "x": X,
        "scale": ("float32", (4,)),
        "bias": ("float32", (4,)),
        "axis": -1,
        "epsilon": 1e-5,
    },
    "rms_norm": {"x": X, "scale": ("float32", (4,)), "axis": -1, "epsilon": 1e-5},
    "local_response_norm": {"x": X, "size": 3, "alpha": 1e-4, "beta": 0.75, "bias": 1.0},
    "bernoulli": {"dims": (3,), "state": STATE, "probability": 0.5, "dtype": "bool"},
    "normal": {"dims": (3,), "state": STATE, "mean": 0.0, "std": 1.0, "dtype": "float32"},
    "uniform": {"dims": (3,), "state": STATE, "low": 0.0, "high": 1.0, "dtype": "float32"},
    "randint": {"dims": (3,), "state": STATE, "low": 0, "high": 5, "dtype": "int64"},
    "dropout": {"x": M, "probability": 0.5, "state": STATE},
    "bit_cast": {"x": M, "dtype": "int32"},
    "broadcast_to": {"x": M, "dims": (2, 4, 6)},
    "sum_to": {"x": M, "dims": (1, 6)},
    "conv": {
        **{"x": X, "w": W, "pad": 1, "stride": 1, "dilation": 1, "groups": 1, "bias": V, "flipped": False},
        "compute_dtype": "float64",
    },
    "conv_transpose": {
        **{"x": X, "w": W, "pad": 1, "stride": 2, "dilation": 1, "groups": 1, "output_pad": 0, "bias": V},
        "flipped": False,
        "compute_dtype": "float64",
    },
    "unfold": {"x": X, "size": 2, "pad": 1, "stride": 1, "dilation": 1},
    "fold": {
        **{"x": ("float32", (2, 8, 25)), "output": (4, 4), "size": 2, "pad": 1, "stride": 1, "dilation": 1}
    },
    "affine_grid": {"theta": ("float32", (2, 2, 3)), "dims": (2, 8, 4, 4), "align_corners": False},
    "divisive_norm": {"x": X, "size": 3, "means": X, "alpha": 1e-4, "beta": 0.75, "bias": 1.0},
    "pointwise_backward": {
        **{"mode": "relu", "dy": M, "x": M, "parameter": 0.1, "lower": 0.0, "upper": 6.0},
    },
    "max_pool_backward": {
        **{"dy": ("float32", (2, 8, 5, 5)), "x": X, "size": 2, "pad": 1, "stride": 1, "dilation": 1}
    },
    "avg_pool_backward": {
        **{"dy": ("float32", (2, 8, 5, 5)), "x": X, "size": 2, "pad": 1, "stride": 1},
        "include_padding": False,
    },
    "cross_entropy": {"logits": M, "targets": ("int64", (4,)), "axis": -1, "ignore": 1, "reduction": "mean"},
    "ctc_loss": {
        **{"log_probs": ("float32", (5, 4, 6)), "targets": INTEGERS},
        **dict.fromkeys(("input_lengths", "target_lengths"), ("int64", (4,))),
        **{"blank": 0, "reduction": "mean", "zero_infinity": False},
    },
    "eye": {"rows": 3, "columns": 3, "k": 0, "dtype": "float32"},
    "expand_dims": {"x": M, "axis": 0},
    "squeeze": {"x": ("float32", (1, 3)), "axis": 0},
    "flip": {"x": M, "axis": 0},
    "full": {"dims": (2,), "value": 1, "dtype": "float32"},
    "gather_nd": {"x": M, "indices": ("int64", (3, 1)), "batch_dims": 0},
    "grid_sample": {
        **{"x": X, "grid": ("float32", (2, 3, 3, 2)), "mode": "linear", "padding": "zeros"},
        "align_corners": False,
    },
    "grouped_matmul": {
        "tokens": ("float32", (5, 6)),
        "weights": ("float32", (3, 6, 7)),
        "offsets": ("int32", (3,)),
    },
    "gru": {"x": LAYER, "weights": [WEIGHTS[3]], "h0": ("float32", (1, 2, 5)), **RECURRENT},
    "rnn": {
        **{"x": LAYER, "weights": [WEIGHTS[1]], "h0": ("float32", (1, 2, 5)), "activation": "tanh"},
        **RECURRENT,
    },
    "lstm": {
        **{"x": LAYER, "weights": [WEIGHTS[4]], **dict.fromkeys(("h0", "c0"), ("float32", (1, 2, 5)))},
        **RECURRENT,
    },
    "pack_padded_sequence": {"x": LAYER, "lengths": (3, 1)},
    "pad_packed_sequence": {"data": ("float32", (4, 6)), "lengths": (3, 1)},
    "linear": {"x": M, "w": ("float32", (5, 6)), "bias": ("float32", (5,))},
    "matmul": {"a": M, "b": ("float32", (6, 3)), "compute_dtype": "float64"},
    "moveaxis": {"x": M, "source": 0, "destination": 1},
    "swapaxes": {"x": M, "axis": 0, "other": 1},
    "transpose": {"x": M, "axes": (1, 0)},
    "reshape": {"x": M, "dims": (24,)},
    "one_hot": {"indices": ("int64", (3,)), "depth": 3, "axis": -1, "on": 1, "off": 0, "dtype": "float32"},
    "pad": {"x": M, "widths": 1, "value": 0, "mode": "constant"},
    "put": {
        **{"x": M, "indices": ("int64", (3,)), "updates": ("float32", (3, 6)), "axis": 0, "batch_dims": 0},
        "reduction": "add",
    },
    "put_along_axis": {
        **{"x": M, "indices": ("int64", (2, 6)), "updates": ("float32", (2, 6)), "axis": 0},
        "reduction": "none",
    },
    "scatter_nd": {
        **{"x": M, "indices": ("int64", (3, 1)), "updates": ("float32", (3, 6)), "batch_dims": 0},
        "reduction": "none",
    },
    "take": {"x": M, "indices": ("int64", (3,)), "axis": 0, "batch_dims": 0},
    "take_along_axis": {"x": M, "indices": ("int64", (2, 6)), "axis": 0},
    "reduce": {"mode": "sum", "x": M, "axis": 0, "keepdims": False, "compute_dtype": "float64"},
    "repeat": {"x": M, "repeats": 2, "axis": 0},
    "tile": {"x": M, "repeats": 2},
    "roll": {"x": M, "shift": 1, "axis": 0},
    "resize": {
        **{
            "x": X,
            "sizes": (2, 8, 8, 8),
            "mode": "nearest",
            "coordinates": "half_pixel",
            "rounding": "floor",
        },
        **{"cubic_coefficient": -0.75, "exclude_outside": False, "antialias": False, "extrapolation": 0.0},
    },
    "slice": {"x": M, "index": 0},
    "to_layout": {"x": X, "layout": "NHWC"},
    "top_k": {"x": M, "k": 2, "axis": -1, "largest": True, "in_order": True},
    "wrap": {"x": INTEGERS, "dtype": "int8"},
}
"""Functions → valid arguments; a tensor as its dtype and dims."""
OTHERS: list[Any] = [
    *(None, 3, -1, 99, 0, 2.5, -0.5, float("nan"), float("inf"), 1e300, 2**70, -(2**70), True, "no", "é"),
    *((1,), (1, 2), (9, 9), (-1, -1), ("a",), [], {}, object(), 1j, int, slice(0, 9, 0)),
    *(np.ones(3), np.array(2), np.float32(1), GraphBuilder().input("x", (3,)), TensorSpec.packed((1,))),
]
TENSORS = [
    *(("float32", dims) for dims in ((), (7,), (5, 5), (0, 6), (2,), (1,) * 7, (1, 2, 5, 16))),
    *(("int32", dims) for dims in ((4, 6), (8,))),
    *(("bool", dims) for dims in ((3,), (4, 6))),
    *(("int8", (2, 8, 4, 4)), ("float64", (2, 8, 4, 4)), ("int64", (1, 2, 8, 16)), ("float16", (4, 6))),
]


def is_tensor(argument: object) -> bool:
    return isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[1], tuple)


class Calls:
    """Calls of one builder."""

    def __init__(self) -> None:
        self.g = GraphBuilder()
        self.numbers = itertools.count()

    def made(self, argument: Any) -> Any:
        """An argument, of the builder if it is a tensor."""
        if isinstance(argument, list) and argument:
            return [self.made(one) for one in argument]
        if is_tensor(argument):
            return self.g.input(f"x{next(self.numbers)}", argument[1], argument[0])
        return argument

    def wrong(self, name: str) -> list[tuple[str, object, InvalidRequest]]:
        """The errors of calls with one argument that is another, with that argument's name and value."""
        function, valid = getattr(self.g, name), {k: self.made(v) for k, v in ARGUMENTS[name].items()}
        function(**valid)
        found = []
        for other in (*OTHERS, *map(self.made, TENSORS)):
            for argument in valid:
                try:
                    function(**{**valid, argument: other})
                except InvalidRequest as error:
                    found.append((argument, other, error))
        return found


@cases_in_one_test
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_wrong_is_told_of_an_argument_of_the_function(name: str) -> None:
    arguments = list(inspect.signature(getattr(GraphBuilder, name)).parameters)[1:]
    found = Calls().wrong(name)
    assert found
    for argument, other, error in found:
        field = error.field.partition("[")[0]
        assert field in arguments, f"{argument}={other!r}: {error}"


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            lambda g, x: g.max_pool(x, kernel_size=2),
            "GraphBuilder.max_pool() has no argument 'kernel_size'; use size; it has x, size, pad, stride, d",
        ),
        (
            lambda g, x: g.avg_pool(x, 2, padding=1),
            "GraphBuilder.avg_pool() has no argument 'padding'; use pad;",
        ),
        (lambda g, x: g.lp_pool(x, ksize=2), "GraphBuilder.lp_pool() has no argument 'ksize'; use size; it"),
        (
            lambda g, x: g.max_pool(x, window=2),
            "GraphBuilder.max_pool() has no argument 'window'; use size; it",
        ),
        (
            lambda g, x: g.max_pool(x, 2, strides=2),
            "GraphBuilder.max_pool() has no argument 'strides'; use str",
        ),
        (
            lambda g, x: g.adaptive_avg_pool(x, output_size=1),
            "GraphBuilder.adaptive_avg_pool() has no argument",
        ),
        (
            lambda g, x: g.max_pool(x, 2, 2),
            "GraphBuilder.max_pool() takes x, size by position, and by name pad,",
        ),
        (
            lambda g, x: g.sum(x, dim=1),
            "GraphBuilder.sum() has no argument 'dim'; use axis; it has x, axis, ke",
        ),
        (lambda g, x: x.sum(dim=1), "Tensor.sum() has no argument 'dim'; use axis; it has axis, keepdims"),
        (
            lambda g, x: g.softmax(x, axsi=1),
            "GraphBuilder.softmax() has no argument 'axsi'; did you mean \"axis\"?",
        ),
        (
            lambda g, x: g.conv(x, x, mode=1),
            "GraphBuilder.conv() has no argument 'mode'; use flipped; it has x",
        ),
        (
            lambda g, x: g.sum(x, dtype="float64"),
            "GraphBuilder.sum() has no argument 'dtype'; use compute_dtype; it",
        ),
        (lambda g, x: g.exp(x, 3), "GraphBuilder.exp() takes 2 positional arguments but 3 were given"),
    ],
)
def test_an_argument_by_another_library_s_name_is_told_ours(use: Any, text: str) -> None:
    g = GraphBuilder()
    with pytest.raises(TypeError) as caught:
        use(g, g.input("x", (1, 2, 4, 4)))
    assert str(caught.value).startswith(text)


def test_a_window_that_covers_nothing_is_told_by_the_argument_that_makes_it_so() -> None:
    g = GraphBuilder()
    x = g.input("x", (1, 2, 4, 4))
    with pytest.raises(
        InvalidRequest, match=r"^size=\(9, 9\): extends over 9 elements in spatial dim 0, but"
    ):
        g.max_pool(x, 9)
    with pytest.raises(
        InvalidRequest, match=r"^pad=\(3, 3\): is so large that window 0 in spatial dim 0 cov"
    ):
        g.max_pool(x, 2, pad=3)


class Named:
    """A dtype of PyTorch, as far as it is text."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_a_dtype_of_pytorch_is_told_by_name(name: str) -> None:
    dtype: Any = Named(name)
    with pytest.raises(InvalidRequest) as caught:
        GraphBuilder().input("x", (1,), dtype)
    assert str(caught.value).startswith(f"dtype=torch.{name}: is not an element type that tensors can have")
    assert f'; pass "{name}", or convert to one of ' in str(caught.value)
