"""Wrong uses of a graph builder: each is an error that names the user's argument, at the user's line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor import protocol
from cudnn_actor.protocol import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvSpec,
    GraphBuilder,
    GraphLimits,
    InvalidRequest,
    MatMul,
    MaxPool,
    NoValues,
    Numerics,
    Tensor,
    Window,
    alibi_slopes,
)
from cudnn_actor.protocol.types import other_names

from ..in_one_test import cases_in_one_test, in_one_test


class Wrong(NamedTuple):
    """A wrong use, and how its error's text begins."""

    use: Callable[[GraphBuilder, Inputs], object]
    text: str


class Inputs:
    """Inputs of a builder."""

    def __init__(self, g: GraphBuilder) -> None:
        self.x, self.w = g.input("x", (2, 8, 4, 4)), g.input("w", (8, 8, 3, 3))
        self.v, self.m, self.i = g.input("v", (8,)), g.input("m", (4, 6)), g.input("i", (4, 6), "int32")
        self.q, self.s = g.input("q", (1, 2, 8, 16)), g.input("s", (2,), "int64")
        self.n = g.input("n", ())
        self.other = GraphBuilder().input("x", (2, 8, 4, 4))


SQUARES = Window.symmetric(2, 2)
ANY: Any = None
RECORDS: Any = protocol
"""For what a type checker would refuse."""


def anything(value: object) -> Any:
    return value


def of_heads(g: GraphBuilder) -> dict[str, Any]:
    """A query of 8 features, and the weights for it."""
    weights = {"in_proj_weight": g.input("w_in", (24, 8)), "out_proj.weight": g.input("w_out", (8, 8))}
    return {"query": g.input("query", (5, 3, 8)), "weights": weights}


def of_layers(g: GraphBuilder, *layers: list[tuple[int, ...]], dtype: Any = "float32") -> dict[str, Any]:
    """7 steps of 4 features, and weights of these dims."""
    weights = [[g.input(f"w{n}_{m}", dims) for m, dims in enumerate(own)] for n, own in enumerate(layers)]
    return {"x": g.input("steps", (7, 3, 4), dtype), "weights": weights}


WRONG = [
    Wrong(
        lambda g, t: g.conv(g.input("image", (1, 32, 32, 8)), t.w),
        "w=(8, 8, 3, 3): has 8 channels, but x has 32 in 1 groups; x seems to have its channels last: pass "
        "x.transpose(0, 3, 1, 2), since dims are N, C, spatial",
    ),
    Wrong(
        lambda g, t: g.input("a", (1,), anything("fp16")),
        "dtype='fp16': is not an element type that tensors can have; pass \"float16\", or convert",
    ),
    Wrong(
        lambda g, t: t.m + np.array(2.0),
        "b=ndarray of float64 (): is neither a tensor nor a number; take the number out of it: value.item()",
    ),
    Wrong(
        lambda g, t: t.m + Decimal(2),
        "b=Decimal('2'): is neither a tensor nor a number; convert it: fl",
    ),
    Wrong(
        lambda g, t: g.take(t.m, anything(3), 0),
        'indices=3: is a number where a tensor belongs; make it a tensor: g.full(dims, value, "int64")',
    ),
    Wrong(
        lambda g, t: g.eye(anything(3.0)), "rows=3.0: must be a whole number ≥ 0; pass an int, as in rows=3"
    ),
    Wrong(lambda g, t: t.m[:0][0], "index=0: names an element of axis 0, which has none; use a slice"),
    # What PyTorch or NumPy take, and what would be lost in silence.
    Wrong(lambda g, t: g.gelu(t.x, approximate=anything("none")), "approximate='none': is not a bool"),
    Wrong(lambda g, t: g.pad(t.m, 1, 9, mode="reflect"), "value=9: is given, but mode reflect pads"),
    Wrong(lambda g, t: g.full((2,), 1e300), "value=1e+300: is no number of float32"),
    Wrong(lambda g, t: g.full((2,), 7e4, "float16"), "value=70000.0: is no number of float16"),
    Wrong(lambda g, t: g.arange(float("inf")), "stop=inf: is not finite"),
    Wrong(lambda g, t: g.arange(1, 2, 0), "step=0: must not be 0"),
    Wrong(lambda g, t: g.input("\ud800", (2,)), "name='\\ud800': has half of a surrogate pair"),
    Wrong(
        lambda g, t: g.build(
            y=t.v + 1, updates={"m": t.m * 0 + t.n, "i": t.i, "s": g.full((2,), 1, "int64")}
        ),
        "updates='s': is an input that nothing in the graph reads",
    ),
    Wrong(lambda g, t: alibi_slopes(0), "heads=0: is no number of heads"),
    Wrong(lambda g, t: alibi_slopes(anything(2.5)), "heads=2.5: is no number of heads"),
    # Tensors.
    Wrong(lambda g, t: g.exp(t.other), "x=<x: float32 (2, 8, 4, 4)>: belongs to another builder"),
    Wrong(lambda g, t: g.max_pool(anything(2.0), 2), "x=2.0: is a number where a tensor belongs"),
    Wrong(lambda g, t: t.x @ anything(3), "b=3: is a number where a tensor belongs"),
    Wrong(lambda g, t: np.ones((4, 4)) @ t.m, "a=ndarray of float64 (4, 4): is no tensor of this builder"),
    Wrong(
        lambda g, t: t.m @ t.m, "b=(4, 6): has 4 rows, but a, of dims (4, 6), has 6 columns; give b as many"
    ),
    Wrong(
        lambda g, t: t.m[t.i],
        "index=<i: int32 (4, 6)>: is not a whole number, a slice of them, ... or None; use g.take",
    ),
    Wrong(lambda g, t: t.m.reshape((-1, -1)), "dims=(-1, -1): leave more than one size open; use one -1"),
    Wrong(lambda g, t: g.transpose(anything("x")), "x='x': is no tensor of this builder"),
    Wrong(lambda g, t: g.slice(anything(3), 0), "x=3: is a number"),
    Wrong(lambda g, t: g.global_avg_pool(anything(3)), "x=3: is a number"),
    Wrong(lambda g, t: g.batch_norm(t.x, ANY, t.v), "mean=None: is left out"),
    Wrong(lambda g, t: g.layer_norm(t.m, anything(1.0)), "scale=1.0: is a number where a tensor belongs"),
    # Numbers.
    Wrong(lambda g, t: t.x + np.ones(4), "b=ndarray of float64 (4,): is neither a tensor nor a number"),
    Wrong(
        lambda g, t: t.x * np.array(2.0),
        "b=ndarray of float64 (): is neither a tensor nor a number; take",
    ),
    Wrong(lambda g, t: t.x * anything(Decimal(2)), "b=Decimal('2'): is neither a tensor nor a number"),
    Wrong(lambda g, t: t.x * anything(2j), "b=2j: is neither a tensor nor a number"),
    Wrong(lambda g, t: g.eye(anything(3.0)), "rows=3.0: must be a whole number ≥ 0; pass an int"),
    Wrong(lambda g, t: g.one_hot(t.i, anything("a")), "depth='a': must be a whole number ≥ 0"),
    Wrong(lambda g, t: t.x + 10**400, "b=1000000"),
    Wrong(lambda g, t: t.i + 2**70, "b=1180591620717411303424: is beyond the range"),
    Wrong(lambda g, t: t.i + 2**63, "b=9223372036854775808: is beyond the range"),
    Wrong(lambda g, t: g.where(t.m > 0, True, t.m), "a=True: is a truth value, not a number"),
    Wrong(lambda g, t: g.full((2,), anything("a")), "value='a': is neither a tensor nor a number"),
    Wrong(lambda g, t: g.full((2,), float("nan"), "int32"), "value=nan: is no number of int32"),
    Wrong(lambda g, t: g.full((2,), 300, "int8"), "value=300: is no number of int8"),
    # Broadcasting.
    Wrong(
        lambda g, t: t.x + t.v,
        "b=(8,): does not broadcast with dims (2, 8, 4, 4): along dim -1 they have the sizes 8",
    ),
    Wrong(lambda g, t: g.where(t.m > 0, t.v, 0.0), "a=(8,): does not broadcast with dims (4, 6)"),
    Wrong(lambda g, t: g.broadcast_to(t.x, (3,)), "dims=(3,): cannot be reached from dims (2, 8, 4, 4)"),
    Wrong(lambda g, t: g.broadcast_to(t.x, anything(3)), "dims=3: must be a sequence of whole numbers"),
    Wrong(lambda g, t: g.sum_to(t.x, anything(3)), "dims=3: must be a sequence of whole numbers"),
    Wrong(lambda g, t: g.conv(t.x, t.w, bias=t.v[:3]), "bias=(3,): must have one value for each of the 8"),
    # Dtypes.
    Wrong(
        lambda g, t: g.conv(t.x, t.w.astype("float16")),
        'w=float16: differs from the dtype of x, float32; use w.astype("float32") or x.astype("float16")',
    ),
    Wrong(
        lambda g, t: g.apply(
            ConvolutionBackwardData(dy=t.x, w=t.w.astype("int8"), conv=ConvSpec.symmetric(2))
        ),
        "w=int8: differs from the dtype of dy, float32",
    ),
    Wrong(
        lambda g, t: g.apply(
            ConvolutionBackwardFilter(x=t.x, dy=t.x.astype("float64"), conv=ConvSpec.symmetric(2)),
            like={"dw": t.w},
        ),
        "dy=float64: differs from the dtype of x, float32",
    ),
    Wrong(
        lambda g, t: g.conv(t.x.astype("int32"), t.w.astype("int32")),
        "x=int32: is not a dtype that conv_fwd takes; convert both operands to one of float64, float32",
    ),
    Wrong(lambda g, t: g.wrap(t.m, "int8"), "x=float32: is no dtype of integers; use g.astype"),
    Wrong(lambda g, t: g.wrap(t.s, "float32"), "dtype=float32: is no dtype of integers; use g.astype"),
    Wrong(lambda g, t: g.wrap(t.s, "bool"), "dtype=bool: is no dtype of integers"),
    Wrong(lambda g, t: g.mean(t.i), "x=int32: is no floating-point dtype, which mean needs; convert it"),
    Wrong(lambda g, t: g.logsumexp(t.i, 0), "x=int32: is no floating-point dtype, which log_sum_exp needs"),
    # Parameters.
    Wrong(lambda g, t: g.attention(t.q, t.q, t.q, window=anything(4)), "window=4: is not a pair"),
    Wrong(lambda g, t: g.attention(t.q, t.q, t.q, window=(-1, 0)), "window=-1: must be a whole number"),
    Wrong(lambda g, t: g.attention(t.q, t.q, t.q, alibi=anything(2)), "alibi=(2.0,): are not a finite"),
    Wrong(lambda g, t: g.attention(t.q, t.q, t.q, causal=anything("no")), "causal='no': is no way in which"),
    Wrong(
        lambda g, t: g.attention(t.q, t.q, t.q, score=anything(3)), "score=3: is no function; pass one that"
    ),
    Wrong(
        lambda g, t: g.attention(t.q, t.q, t.q, score=anything(lambda scores: None)),
        "score=None: is what the function returned, and no tensor; have it return the scores to use",
    ),
    Wrong(
        lambda g, t: g.attention(t.q, t.q, t.q, score=lambda scores: scores, sinks=g.input("sinks", (2,))),
        "sinks=(2,): is given, and so is score; give one of the two",
    ),
    Wrong(
        lambda g, t: g.multi_head_attention(**of_heads(g), heads=3),
        "heads=3: does not divide the 8 rows of each projection in in_proj_weight, of dims (24, 8); give the",
    ),
    Wrong(
        lambda g, t: g.multi_head_attention(**of_heads(g), heads=2, residual=t.m),
        "residual=(4, 6): does not have the dims of the result; give it ",
    ),
    Wrong(
        lambda g, t: g.multi_head_attention(g.input("heads", (5, 3, 8)), weights={}, heads=2),
        "weights=(): has no in_proj_weight; give in_proj_weight, out_proj.weight, and of in_proj_bias",
    ),
    # Weights of recurrent layers are named by their places.
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 6), (20, 5)])),
        "weights[0][0]=float32 (20, 6): is no weight_ih of a layer of 5 units that reads float32 with 4 "
        "features; give it dims (20, 4), of float32",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 4), (16, 5)])),
        "weights[0][1]=float32 (16, 5): is no weight_hh of a la",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 4), (20, 5), (10,), (10,)])),
        "weights[0][2]=float32 (10,): is no bias_ih of a layer of 5 units that reads float32 with 4",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 4), (20, 3), (5, 3)])),
        "weights[0][2]=float32 (5, 3): is no weight_hr of a layer of 5 units that reads float32 with 4 "
        "features; give it dims (3, 5), of float32",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 4), (20, 5)], [(20, 4), (20, 5)])),
        "weights[1][0]=float32 (20, 4): is no weight_ih of a layer of 5 units that reads float32 with 5",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 4), (20, 5)]), bidirectional=True),
        "weights=[[<",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(18, 4), (18, 5)])),
        "weights[0][0]=float32 (18, 4): has no rows for 4 gates; g",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 4), (20, 5)], dtype="float16")),
        "weights[0][0]=float32 (20, 4): is no weight_ih of a layer of 5 units that reads float16 with 4",
    ),
    Wrong(
        lambda g, t: g.lstm(**of_layers(g, [(20, 4), (20, 5)], [(20, 5), (20, 5), (20,), (20,)])),
        "weights[1]=[<",
    ),
    Wrong(
        lambda g, t: g.ctc_loss(g.input("l", (5, 4, 6)), t.i, anything(5), t.i),
        'input_lengths=5: is a number where a tensor belongs; make it a tensor: g.full(dims, value, "int64")',
    ),
    Wrong(lambda g, t: g.attention(t.q, t.q, t.q, dropout=0.5), "state=None: is what dropout draws from"),
    Wrong(lambda g, t: g.max_pool(t.m, 2), "x=(4, 6): has no spatial dims"),
    Wrong(lambda g, t: g.max_pool(t.x, 2, pad=-1), "pad=(-1, -1): has a value that is not from 0"),
    Wrong(lambda g, t: g.conv(t.m, t.w), "x=(4, 6): has no spatial dims"),
    Wrong(lambda g, t: g.conv(t.x, t.m), "w=(4, 6): has another rank than x, of dims (2, 8, 4, 4)"),
    Wrong(lambda g, t: g.elu(t.x, anything("a")), "alpha='a': has the wrong type; pass a number"),
    Wrong(lambda g, t: g.celu(t.x, 0), "alpha=0.0: must be a finite number > 0"),
    Wrong(lambda g, t: g.clip(t.x, anything(t.m)), "lower=<m: float32 (4, 6)>: has the wrong type"),
    Wrong(lambda g, t: g.reduce(anything("summ"), t.x), "mode='summ': is not a member of ReductionMode; did"),
    Wrong(lambda g, t: g.pointwise("rulu", t.x), "mode='rulu': is no pointwise mode; did you mean \"relu\"?"),
    Wrong(lambda g, t: t.x.sum(9), "axis=9: is no dim of x, which has 4"),
    Wrong(
        lambda g, t: t.x.sum(anything(1.0)),
        "axis=1.0: has the wrong type; pass a whole number, a tuple of them, or None",
    ),
    Wrong(lambda g, t: t.x.sum(0, keepdims=anything("no")), "keepdims='no': has the wrong type"),
    Wrong(lambda g, t: g.argmax(t.x, anything(1.5)), "axis=1.5: has the wrong type; pass a whole number"),
    Wrong(lambda g, t: g.pad(t.x, anything(1.5)), "widths=1.5: must be a whole number, or a pair"),
    Wrong(lambda g, t: g.pad(t.x, [(1, 1)]), "widths=[(1, 1)]: must be a whole number, or a pair"),
    Wrong(lambda g, t: g.pad(t.x, -1), "widths=(-1, -1, -1, -1): must not be negative"),
    Wrong(lambda g, t: g.resize(t.x), "sizes=None: is left out, and so is scales; give either"),
    Wrong(lambda g, t: g.resize(t.x, sizes=(4,), scales=(2.0,)), "sizes=(4,): is given, and so is scales"),
    Wrong(
        lambda g, t: g.resize(t.x, scales=anything(2.0)),
        "scales=2.0: must have one number for each dim to resize, 4 in",
    ),
    Wrong(
        lambda g, t: g.resize(t.x, sizes=(4, 4), axes=(2,)),
        "sizes=(4, 4): must have one number for each dim to resize",
    ),
    Wrong(lambda g, t: g.resize(t.x, sizes=(3, 5), axes=(2, 2)), "axes=(2, 2): names a dim twice"),
    Wrong(lambda g, t: g.resize(t.x, sizes=(3,), axes=anything(2)), "axes=2: must be a sequence of whole n"),
    Wrong(
        lambda g, t: g.resize(t.x, scales=anything(("a", 1)), axes=(2, 3)),
        "scales=('a', 1): must make at most 2**48 elements of the 4 of dim 2",
    ),
    Wrong(
        lambda g, t: g.resize(t.x, scales=(1, -0.5), axes=(2, 3)),
        "scales=(1, -0.5): must make at most 2**48 elements of the 4 of dim 3, and be above 0",
    ),
    Wrong(lambda g, t: g.resize(t.x, scales=(1e300,), axes=(2,)), "scales=(1e+300,): must make at most 2*"),
    Wrong(lambda g, t: g.pad(t.x, 1, ANY), "value=None: has the wrong type"),
    Wrong(lambda g, t: t.x.reshape(anything(2.5), -1), "dims=(2.5, -1): must be a sequence of whole numbers"),
    Wrong(lambda g, t: t.x.transpose(anything("ab")), "axes=('a', 'b'): must be a sequence of whole numbers"),
    Wrong(lambda g, t: t.x[::0], "index=slice(None, None, 0): has a step of 0"),
    Wrong(lambda g, t: t.x[1.0:], "index=slice(1.0, None, None): is not a whole number"),
    # Random numbers.
    Wrong(lambda g, t: g.uniform((3,), t.s, 1, 0), "high=0.0: is below low, 1.0"),
    Wrong(lambda g, t: g.randint((3,), t.s, 5, 1), "high=1: is not above low, 5"),
    Wrong(lambda g, t: g.normal((3,), t.s, 0, -1), "std=-1.0: is below 0"),
    Wrong(lambda g, t: g.uniform((3,), t.x), "state=<x: float32 (2, 8, 4, 4)>: is not a state"),
    Wrong(lambda g, t: g.dropout(anything(3), 0.5, t.s), "x=3: is a number where a tensor belongs"),
    Wrong(lambda g, t: g.advance(t.s, 2**70), "count=1180591620717411303424: must be a whole number"),
    # Operations.
    Wrong(lambda g, t: g.apply(MaxPool(x=t.x, window=SQUARES), also="index"), "also='index': is not a seq"),
    Wrong(lambda g, t: g.apply(MaxPool(x=t.x, window=SQUARES), also=("i",)), "also='i': is not an output of"),
    Wrong(lambda g, t: g.apply(MaxPool(x=t.x, window=SQUARES), like=anything(t.x)), "like=<x: float32 (2, 8"),
    Wrong(lambda g, t: g.apply(MaxPool(x=t.x, window=anything(2))), "window=2: has type int, but MaxPool"),
    Wrong(lambda g, t: g.apply(MaxPool(x=t.x, y=t.x, window=SQUARES)), "y=<x: float32 (2, 8, 4, 4)>: is not"),
    Wrong(lambda g, t: g.apply(MatMul(a=t.m, b=t.m, numerics=Numerics())), "numerics=Numerics(): "),
    Wrong(lambda g, t: g.apply(anything(MaxPool)), "operation=MaxPool: is not an operation"),
    # Functions of several tensors, and of places.
    Wrong(lambda g, t: g.concatenate(anything(3)), "tensors=3: is no sequence of tensors"),
    Wrong(lambda g, t: g.stack((t.x, anything(3))), "tensors[1]=3: is a number where a tensor belongs"),
    Wrong(lambda g, t: g.stack((t.m, t.i)), "tensors[1]=int32: differs from the dtype of the first, float32"),
    Wrong(lambda g, t: g.concatenate((t.m, t.x)), "tensors[1]=(2, 8, 4, 4): differs from dims (4, 6)"),
    Wrong(lambda g, t: g.concatenate([], 0), "tensors=(): are none"),
    Wrong(lambda g, t: g.concatenate((t.m,), 2), "axis=2: is no dim of tensors[0], which has 2"),
    Wrong(lambda g, t: g.stack((t.m,), 5), "axis=5: is no dim of the result, which has 3; use one from -3 t"),
    Wrong(lambda g, t: g.expand_dims(t.m, 5), "axis=5: is no dim of the result, which has 3; use one from -"),
    Wrong(lambda g, t: g.expand_dims(t.m, (0, 0)), "axis=(0, 0): names a dim twice"),
    Wrong(lambda g, t: g.one_hot(t.i, 2, 5), "axis=5: is no dim of the result, which has 3"),
    Wrong(lambda g, t: g.one_hot(t.i, 10**15), "depth=1000000000000000: overflows"),
    Wrong(
        lambda g, t: g.split(t.m, (1, 2)), "sections=(1, 2): must be sizes ≥ 0 that add up to 4, that of d"
    ),
    Wrong(lambda g, t: g.split(t.m, anything(2.5)), "sections=2.5: must be a sequence of whole numbers"),
    Wrong(lambda g, t: g.depth_to_space(t.x, 3), "block=3: needs a multiple of 9 where x has a dim of 8"),
    Wrong(lambda g, t: g.space_to_depth(t.x, 3), "block=3: needs a multiple of 3 where x has a dim of 4"),
    Wrong(
        lambda g, t: g.sort(t.m, descending=anything("a")), "descending='a': has the wrong type; pass True"
    ),
    Wrong(lambda g, t: g.argsort(t.m, descending=anything("a")), "descending='a': has the wrong type"),
    Wrong(lambda g, t: g.concatenate((t.x, anything(3))), "tensors[1]=3: is a number where a tensor bel"),
    Wrong(lambda g, t: g.tile(t.m, anything(2.5)), "repeats=2.5: must be a whole number"),
    Wrong(lambda g, t: g.flip(t.m, anything(1.5)), "axis=1.5: is no dim of x, which has 2"),
    Wrong(lambda g, t: g.roll(t.m, anything(1.5), 0), "shift=1.5: is not a whole number"),
    Wrong(lambda g, t: g.arange(anything("a")), "stop='a': is neither a tensor nor a number"),
    Wrong(lambda g, t: g.arange(1e30), "stop=1e+30: overflows: more than 2**48 elements"),
    Wrong(lambda g, t: g.arange(0, 1e300, 1e-300), "stop=1e+300: overflows: more than 2**48 elements"),
    Wrong(lambda g, t: g.eye(2, -1), "columns=-1: must be a whole number ≥ 0"),
    Wrong(lambda g, t: g.eye(2, k=anything("a")), "k='a': must be a whole number"),
    Wrong(lambda g, t: g.take_along_axis(t.m, t.i, anything("a")), "axis='a': is no dim of x"),
    # Gradients.
    Wrong(lambda g, t: g.grad(t.x * 2, t.x, anything(1.0)), "upstream=1.0: is a number where a tensor bel"),
    Wrong(lambda g, t: g.grad((), t.x), "outputs=(): are none"),
    Wrong(lambda g, t: g.grad(t.x * 2, anything("x")), "wrt='x': is no tensor of this builder"),
    # Graphs.
    Wrong(lambda g, t: GraphBuilder(limits=anything(5)), "limits=5: is of type int where a GraphLimits"),
    Wrong(lambda g, t: GraphBuilder(anything(GraphLimits())), "numerics=GraphLimits(): is of type"),
    Wrong(lambda g, t: g.build(anything(t.x)), "outputs=<x: float32 (2, 8, 4, 4)>: is not a mapping"),
    Wrong(lambda g, t: g.build({"y": t.x}, y=t.x), "y=<x: float32 (2, 8, 4, 4)>: is given twice"),
    Wrong(lambda g, t: g.build(y=anything((t.x, t.x))), "y=(<x: float32 (2, 8, 4, 4)>, <x: float32 (2, 8,"),
    Wrong(lambda g, t: g.build(y=t.x, updates=anything([t.x])), "updates=[<x: float32 (2, 8, 4, 4)>]: is"),
    Wrong(lambda g, t: g.build(y=t.x, updates={"vv": t.v}), "updates='vv': is no input; did you mean \"v\"?"),
]


@in_one_test("wrong", WRONG, ids=lambda wrong: wrong.text.partition(":")[0])
def test_a_wrong_use_names_the_argument(wrong: Wrong) -> None:
    g = GraphBuilder()
    inputs = Inputs(g)
    with pytest.raises(InvalidRequest) as caught:
        wrong.use(g, inputs)
    assert str(caught.value).startswith(wrong.text)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files.index(__file__) == 0
    assert files.count(__file__) == 2, "the traceback has the user's line"


def test_a_layout_that_is_none_is_not_told_of_strides_that_an_input_cannot_have() -> None:
    with pytest.raises(InvalidRequest) as caught:
        GraphBuilder().input("z", (2, 3), layout=anything((1, 2)))
    assert str(caught.value) == "layout=(1, 2): is not a layout; use one of NCHW, NHWC"


OTHERS: dict[str, Any] = {
    "int": 1,
    "str": "relu",
    "int | Sequence[int]": 1,
    "int | Sequence[Sequence[int]]": 1,
    "Sequence[int]": (1,),
    "DTypeLike": "float32",
    "ReductionMode": "sum",
    "Any": 0.5,
}
"""Arguments by their annotation; others are a tensor."""
FUNCTIONS = {
    name: list(inspect.signature(function).parameters.values())[1:]
    for name, function in inspect.getmembers(GraphBuilder, inspect.isfunction)
    if not name.startswith("_")
}
OF_TENSORS = [
    (name, parameter.name)
    for name, parameters in FUNCTIONS.items()
    for parameter in parameters
    if parameter.annotation in ("Tensor", "Tensor | None")
    and name != "grad"
    and parameter.kind is not parameter.VAR_POSITIONAL
]


@in_one_test("name, wrong", OF_TENSORS)
def test_a_number_where_a_function_takes_a_tensor_is_named(name: str, wrong: str) -> None:
    g = GraphBuilder()
    tensors = {"x": g.input("x", (1, 1, 4, 4)), "state": g.input("s", (2,), "int64")}
    arguments: dict[str, Any] = {}
    for parameter in FUNCTIONS[name]:
        if parameter.name == wrong:
            arguments[wrong] = 3
        elif parameter.default is parameter.empty:
            other = OTHERS.get(parameter.annotation)
            arguments[parameter.name] = tensors.get(parameter.name, tensors["x"]) if other is None else other
    with pytest.raises(InvalidRequest) as caught:
        getattr(g, name)(**arguments)
    assert str(caught.value).startswith(f"{wrong}=3: is a number where a tensor belongs")


class TestSequences:
    """What Python and NumPy do with sequences."""

    g = GraphBuilder()
    x, n = g.input("x", (3, 2)), g.input("n", ())

    def test_length_and_iteration_are_numpys(self) -> None:
        assert len(self.x) == 3
        assert [row.dims for row in self.x] == [(2,)] * 3
        first, *_ = self.x
        assert first.dims == self.x[0].dims

    @pytest.mark.parametrize("of", [len, iter, list])
    def test_a_tensor_without_dims_has_none(self, of: Callable[[Tensor], object]) -> None:
        with pytest.raises(TypeError, match="without dims"):
            of(self.n)

    def test_numpy_reads_no_elements(self) -> None:
        before = self.g.added
        for use in (np.asarray, np.sum, lambda x: np.concatenate([x, x]), lambda x: np.where(x, 1, 2)):
            with pytest.raises(NoValues, match=r"^<x: .*> holds no values that NumPy could read; "):
                use(self.x)
        assert self.g.added == before

    def test_whole_numbers_of_numpy_are_whole_numbers(self) -> None:
        one: Any = np.int64(1)
        assert self.x[one].dims == (2,)
        assert self.x[one:, :one].dims == (2, 1)
        assert self.x.sum(one).dims == (3,)
        assert self.x.reshape(one * 6).dims == (6,)
        assert self.x.transpose(one, 0).dims == (2, 3)


def test_minus_zero_is_a_number_of_its_own() -> None:
    g = GraphBuilder()
    x = g.input("x", (1,))
    values = [t.value for t in g.build(y=x * 0.0, z=x * -0.0).body.tensors if t.value is not None]
    assert [str(value) for value in values] == ["0.0", "-0.0"]


def test_a_missing_argument_is_told_with_the_name_of_the_function() -> None:
    g: Any = GraphBuilder()
    with pytest.raises(TypeError, match=r"^GraphBuilder.exp\(\) missing 1 required positional argument: 'x'"):
        g.exp()
    with pytest.raises(TypeError, match=r"^GraphBuilder.maximum\(\) missing 2"):
        g.maximum()


class TestOtherLibrariesNames:
    """What users of NumPy, PyTorch and TensorFlow write first."""

    g: Any = GraphBuilder()
    x: Any = g.input("x", (2, 3))

    @pytest.mark.parametrize(
        ("use", "text"),
        [
            (lambda g, x: x.relu(), "Tensor has no 'relu'; use g.relu(...), where g is the builder"),
            (
                lambda g, x: x.squeeze(0),
                "Tensor has no 'squeeze'; use g.squeeze(...), where g is the builder",
            ),
            (lambda g, x: x.ndim, "Tensor has no 'ndim'; use x.rank"),
            (lambda g, x: x.permute(1, 0), "Tensor has no 'permute'; use x.transpose(axes)"),
            (lambda g, x: x.numpy(), "Tensor has no 'numpy'; a graph's tensor holds no values: build the"),
            (lambda g, x: x.diims, "Tensor has no 'diims'; did you mean \"dims\"? help(Tensor) lists what"),
            (lambda g, x: g.concat([x, x]), "GraphBuilder has no 'concat'; use g.concatenate(...), where g"),
            (lambda g, x: g.conv2d(x, x), "GraphBuilder has no 'conv2d'; use g.conv(...)"),
            (lambda g, x: g.softmx(x), "GraphBuilder has no 'softmx'; did you mean \"softmax\"? help(G"),
        ],
    )
    def test_they_are_told_ours(self, use: Callable[[Any, Any], object], text: str) -> None:
        with pytest.raises(AttributeError) as caught:
            use(self.g, self.x)
        assert str(caught.value).startswith(text)

    def test_each_name_that_is_told_is_one_of_ours_and_the_others_are_not(self) -> None:
        for name, others in other_names.BUILDER.items():
            assert hasattr(GraphBuilder, name), name
            assert not [each for each in others.split() if hasattr(GraphBuilder, each)]
        assert not [name for name in other_names.TENSOR if hasattr(Tensor, name)]

    def test_functions_of_numpy_are_told_ours(self) -> None:
        with pytest.raises(
            NoValues, match=r"^<x: .*> holds no values .*; use g\.exp, of the builder, in the"
        ):
            np.exp(self.x)
        with pytest.raises(NoValues, match=r"use g\.concatenate, of the builder"):
            np.concatenate([self.x, self.x])
        with pytest.raises(NoValues, match=r"a graph has no numpy\.fft"):
            np.fft.fft(self.x)

    def test_numbers_of_numpy_take_part_in_operators(self) -> None:
        for made in (np.float32(2) * self.x, np.float64(2) % self.x, np.int64(1) < self.x):
            assert made.dims == (2, 3)


@cases_in_one_test
@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            lambda: RECORDS.ConvSpec(pad=1),
            "ConvSpec has no field 'pad'; its fields are pre_padding, post_padding, str",
        ),
        (
            RECORDS.ConvSpec,
            "ConvSpec needs pre_padding, post_padding, stride, dilation: ConvSpec.symmetric(",
        ),
        (
            lambda: RECORDS.Epilogue("relu"),
            "Epilogue takes its fields by name, not by position: write Epilogue(activa",
        ),
        (lambda: RECORDS.Epilogue(activtion=1), "Epilogue has no field 'activtion'; did you mean"),
        (
            lambda: RECORDS.Window(2),
            "Window takes its fields by name, not by position: write Window.symmetric(2, size=",
        ),
        (
            lambda: RECORDS.TensorSpec((1, 2)),
            "TensorSpec takes its fields by name, not by position: write TensorSpec.pa",
        ),
        (
            lambda: RECORDS.Numerics(True),
            "Numerics takes its fields by name, not by position: write Numerics(tf32=True)",
        ),
        (
            lambda: RECORDS.Window(kernel_size=2),
            "Window has no field 'kernel_size'; use size; its fields are",
        ),
        (
            lambda: RECORDS.MaxPool(1),
            "MaxPool takes its fields by name, not by position: write MaxPool(x=..., w",
        ),
        (lambda: RECORDS.MaxPool(x=1), "MaxPool needs window: MaxPool(x=..., window=...)"),
        (lambda: RECORDS.MaxPool(x=1, ksize=2), "MaxPool has no field 'ksize'; use window; its fields are"),
        (lambda: RECORDS.ConvFwd(x=1), "ConvFwd needs w, y, conv: ConvFwd(x=..., w=..., y=..., conv=...)"),
        (lambda: RECORDS.ConvBwdFilter(x=1, dy=1, w=1), "ConvBwdFilter has no field 'w'; use dw; its fields"),
        (
            lambda: RECORDS.ConvBwdData(w=1, dy=1, x=1),
            "ConvBwdData has no field 'x'; use dx; its fields are d",
        ),
        (lambda: RECORDS.Ping(1), "Ping has no fields: write Ping()"),
        (
            lambda: RECORDS.ModelGraph("small"),
            "ModelGraph takes its fields by name, not by position: write ModelGraph(name=..., graph=",
        ),
        (
            lambda: RECORDS.AdaptiveWindow(output=2, size=3),
            "AdaptiveWindow has no field 'size'; use output; it",
        ),
        (
            lambda: RECORDS.GraphLimits(operation=3),
            "GraphLimits has no field 'operation'; did you mean \"operations\"?",
        ),
    ],
)
def test_a_record_s_wrong_arguments_are_told_with_its_fields(use: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        use()
    assert str(caught.value).startswith(text)
