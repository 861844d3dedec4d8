"""The moves by which a program grows.

What they call comes from the tables of operations, of functions and of rows, and from the signatures of the
builder's functions. What is added there is drawn.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import exact
from cudnn_actor.engines.cuda.operations import PARTLY, REFUSED
from cudnn_actor.protocol import ConvSpec, DType, Layout, TensorSpec
from cudnn_actor.protocol.graphs.attention_functions import AttentionFunctions
from cudnn_actor.protocol.graphs.backward_functions import BackwardFunctions
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.graphs.graph_functions import Functions
from cudnn_actor.protocol.graphs.indexing_functions import IndexingFunctions
from cudnn_actor.protocol.graphs.network_functions import NetworkFunctions
from cudnn_actor.protocol.graphs.random_functions import RandomFunctions
from cudnn_actor.protocol.graphs.spatial_functions import SpatialFunctions
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    ConvolutionBackwardData,
    Coordinates,
    GridPadding,
    NearestRounding,
    PointwiseMode,
    ReductionMode,
    ResampleMode,
    ScatterReduction,
)
from cudnn_actor.protocol.operations.gradients import GRADIENTS

from ..operations import ROWS
from ..operations.cases import Arrays, OperationCase, arrays
from ..operations.drawing import case_of
from ..operations.rows import Asked, Row, Sizes, Values
from .programs import Of
from .sketch import FLOATS, MOST_VALUES, SIZES, Refused, Sketch

__all__ = ["ARGUMENTS", "DRAWN", "FUNCTION_NAMES", "MOVES", "OF_OTHER_MOVES", "argument_of"]
__all__ += ["gradient", "image", "operation_of", "parameters_of"]

Dims = tuple[int, ...]
DRAWN = tuple(row for row in ROWS if row.operation not in REFUSED | PARTLY)
"""Of the operations that every engine runs."""


def pointwise(sketch: Sketch) -> None:
    """A function of each element: of tensors, numbers, and new inputs that are broadcast."""
    choose = sketch.choose
    mode = choose.one(PointwiseMode)
    function = FUNCTIONS[mode]
    if function.bits and not any(values.dtype.kind in "iub" for values in sketch.values):
        sketch.input(sketch.some_dims(), choose.one((DType.INT8, DType.UINT8, DType.INT32, DType.INT64)))

    def wants(values: np.ndarray) -> bool:
        return not function.bits or values.dtype.kind in "iub"

    first = sketch.some(wants)
    operands = [first, *(_partner(sketch, first, wants) for _ in range(function.arity - 1))]
    if choose.chance(0.3):
        operands = operands[::-1]
    names = [name for name in function.parameters if choose.chance(0.35)]
    parameters: dict[str, Any] = {n: choose.size(12) / (-4 if n == "lower" else 4) for n in names}
    if choose.chance(0.1):
        parameters["alphas"] = tuple(choose.one((1, 2, -0.5)) for _ in operands)
    sketch.call("pointwise", str(mode), *operands, **parameters)


def _partner(sketch: Sketch, x: Of, wants: Callable[[np.ndarray], bool] = lambda _: True) -> Any:
    """Another operand for a function of each element of x."""
    choose, dims, dtype = sketch.choose, sketch.dims(x), sketch.dtype(x)
    match choose.one(("number", "known", "known", "new", "new")):
        case "number" if dtype.is_floating:
            return choose.one((0.5, 2.0, -1.0, 1.0, 0.0, 0.1, 3))
        case "number":
            return int(choose.rng.integers(-3, 5))
        case "known":
            return sketch.some(lambda values: wants(values) and _broadcast(dims, values.shape))
    part = tuple(1 if choose.chance(0.35) else size for size in dims)[choose.one((0, 0, 0, 1)) :]
    other = choose.one(FLOATS) if dtype.is_floating and choose.chance(0.3) else dtype
    return sketch.input(part, other)


def _broadcast(one: Dims, other: Dims) -> bool:
    try:
        return math.prod(np.broadcast_shapes(one, other)) <= MOST_VALUES
    except ValueError:
        return False


# The same elements in other places, or in another type.


def transpose(sketch: Sketch) -> None:
    """Dims in another order."""
    x = sketch.some()
    sketch.call("transpose", x, tuple(int(a) for a in sketch.choose.rng.permutation(len(sketch.dims(x)))))


def reshape(sketch: Sketch) -> None:
    """Other dims."""
    x = sketch.some(lambda values: values.size > 0)
    left = math.prod(sketch.dims(x))
    dims: list[int] = []
    while left > 1 and len(dims) < 4:
        dims.append(sketch.choose.one([size for size in range(1, left + 1) if left % size == 0]))
        left //= dims[-1]
    sketch.call("reshape", x, (*dims, left))


def cut(sketch: Sketch) -> None:
    """Some of the elements."""
    choose, x = sketch.choose, sketch.some()

    def part(size: int) -> Any:
        match choose.one(("number", "all", "all", "all", "reversed", "some", "some", "some")):
            case "number":
                return int(choose.rng.integers(max(size, 1)))
            case "all":
                return slice(None)
            case "reversed":
                return slice(None, None, -1)
        start = int(choose.rng.integers(max(size, 1)))
        return slice(start, start + choose.size(max(size - start, 1)), choose.one((1, 1, 2, 3)))

    dims = sketch.dims(x)
    sketch.call("slice", x, tuple(map(part, dims[: choose.one((len(dims), len(dims), 1))])))


def arrangement(sketch: Sketch) -> None:
    """Elements joined, parted, repeated or moved."""
    choose = sketch.choose
    x = sketch.some(lambda values: values.ndim > 0)
    dims = sketch.dims(x)
    axis = int(choose.rng.integers(-len(dims), len(dims)))
    match choose.one(ARRANGEMENTS):
        case "concatenate":
            others = range(choose.one((1, 1, 2)))
            resized = [(*dims[:axis], choose.size(4), *dims[len(dims) + axis + 1 :]) for _ in others]
            fits = axis < 0 and choose.chance(0.5)
            parts = [sketch.input(each if fits else dims, sketch.dtype(x)) for each in resized]
            sketch.call("concatenate", (x, *parts) if choose.chance(0.5) else (*parts, x), axis)
        case "stack":
            sketch.call("stack", (x, sketch.some(lambda values: values.shape == dims)), axis)
        case "split":
            size = dims[axis]
            first = int(choose.rng.integers(size + 1))
            sketch.call("split", x, (first, size - first), axis)
        case "array_split":
            sketch.call("array_split", x, 1 + choose.size(3), axis)
        case "tile":
            sketch.call("tile", x, tuple(choose.one((1, 1, 2, 3)) for _ in dims))
        case "repeat":
            sketch.call("repeat", x, choose.size(3), choose.one((None, axis)))
        case "roll":
            sketch.call("roll", x, choose.size(9) - 4, choose.one((None, axis)))
        case name:
            sketch.call(name, x, axis)


ARRANGEMENTS = (
    *("concatenate", "concatenate", "stack", "split", "array_split", "tile", "repeat", "roll", "flip"),
    "expand_dims",
)
"""The functions that `arrangement` draws; those left out are like them, or need certain dims."""


def astype(sketch: Sketch) -> None:
    """Another type."""
    sketch.call("astype", sketch.some(), str(sketch.choose.one(DType)))


# Convolutions, which have no row.


def convolution(sketch: Sketch) -> None:
    """A convolution of a tensor, often with a bias, or the gradient of one."""
    choose = sketch.choose
    x = sketch.some(
        lambda values: 3 <= values.ndim <= 5 and values.size > 0 and values.dtype.kind not in "iub"
    )
    _, channels, *spatial = sketch.dims(x)
    groups = choose.one([g for g in (1, 1, 2, channels) if channels % g == 0])
    filters, taps = groups * choose.one((1, 2, 4)), [choose.one((1, 1, 2, 3)) for _ in spatial]
    pad, stride = choose.one((0, 1)), choose.one((1, 1, 2))
    if choose.chance(0.25):
        w = sketch.input((channels, filters // groups, *taps), sketch.dtype(x))
        conv = ConvSpec.symmetric(len(spatial), pad, stride, 1, groups)
        sketch.call("apply", ConvolutionBackwardData(dy=x, w=w, conv=conv))
        return
    w = sketch.input((filters, channels // groups, *taps), sketch.dtype(x))
    bias = {"bias": sketch.input((filters,), sketch.dtype(x))} if choose.chance(0.5) else {}
    flipped = {"flipped": True} if choose.chance(0.2) else {}
    sketch.call("conv", x, w, pad=pad, stride=stride, groups=groups, **bias, **flipped)


def _is_image(values: np.ndarray) -> bool:
    return 3 <= values.ndim <= 5 and values.size > 0 and values.dtype.kind not in "iub"


# Functions of images whose operands have to fit each other.


def image(sketch: Sketch) -> None:
    """Blocks of an image as columns, often summed up again; the backward pass of a pooling; affine places."""
    choose, x = sketch.choose, sketch.some(_is_image)
    samples, channels, *spatial = dims = sketch.dims(x)
    size = tuple(choose.one([n for n in (1, 2, 2, 3) if n <= along]) for along in spatial)
    kind = choose.one(("columns", "max_pool", "avg_pool", "affine_grid"))
    if kind == "affine_grid":
        theta = sketch.input((samples, len(spatial), len(spatial) + 1), sketch.dtype(x))
        wanted = (samples, channels, *(choose.size(4) for _ in spatial))
        grid = sketch.call("affine_grid", theta, wanted, align_corners=choose.chance(0.5))
        if choose.chance(0.5):
            sketch.call("grid_sample", x, grid)
        return
    options = {"pad": choose.one((0, 0, 1)), "stride": choose.one((size, 1, 2))}
    dilated = {"dilation": choose.one((1, 1, 2))}
    if kind == "columns":
        made = sketch.call("unfold", x, size, **options, **dilated)
        if choose.chance(0.7):
            sketch.call("fold", _or_new(sketch, made), dims[2:], size, **options, **dilated)
        return
    options |= dilated if kind == "max_pool" else {"include_padding": choose.chance(0.5)}
    dy = _or_new(sketch, sketch.call(kind, x, size, **options))
    sketch.call(f"{kind}_backward", dy, x, size, **options)


def _or_new(sketch: Sketch, x: Of) -> Of:
    """x, or an input like it."""
    return x if sketch.choose.chance(0.5) else sketch.input(sketch.dims(x), sketch.dtype(x))


# Operations, by their rows.


def operation(sketch: Sketch) -> None:
    """An operation of the table."""
    operation_of(sketch, sketch.choose.one(DRAWN))


def operation_of(sketch: Sketch, row: Row) -> None:
    """An operation on new inputs, one of which is rather a tensor that is known, in a fitting form."""
    choose = sketch.choose
    floats = [dtype for dtype in row.dtypes if dtype.is_floating and choose.chance(0.9)]
    asked = Asked(
        choose=choose,
        dtype=choose.one(floats or row.dtypes),
        rank=choose.one((*row.ranks, *row.more_ranks)),
        form=None,
        sizes=choose.one((Sizes.TINY, Sizes.TINY, Sizes.ODD)),
        values=choose.one((Values.NORMAL, Values.WHOLE)),
    )
    case = case_of(row, asked, Layout.NCHW, (int(choose.rng.integers(1 << 31)),))
    if not all(0 < spec.size <= MOST_VALUES for spec in case.specs.values()):
        raise Refused
    values, operands = arrays(case), dict[str, Of]()
    names = [name for name, spec in case.inputs.items() if spec.dtype.is_floating]
    if names and choose.chance(0.9):
        known = choose.one(names)
        operands[known] = _like(sketch, case.specs[known])
        values = _with_known(case, values, known, sketch.values[operands[known].number])
    for name, spec in case.inputs.items():
        if name not in operands:
            operands[name] = sketch.input(spec.dims, spec.dtype, values[name])
    also = tuple(name for name in case.outputs if name in row.operation.optional)
    bare = msgspec.structs.replace(case.operation, **dict.fromkeys(row.operation.outputs))
    given: dict[str, Any] = {"also": also} if also else {}
    unknown = case.outputs.keys() - case.operation.infer(case.inputs).keys()
    if unknown:
        given["like"] = {name: _as_large(sketch, case.specs[name]) for name in sorted(unknown)}
    sketch.call("apply", bare.with_operands(operands.__getitem__), **given)


def _like(sketch: Sketch, spec: TensorSpec) -> Of:
    """A tensor that is known, in these dims and this dtype; or some of its elements."""
    fits = any(values.shape == spec.dims for values in sketch.values) and sketch.choose.chance(0.8)
    x = sketch.some(lambda values: values.shape == spec.dims if fits else values.size > 0)
    missing = spec.size - math.prod(sketch.dims(x))
    if missing:
        x = x if len(sketch.dims(x)) == 1 else sketch.call("reshape", x, (math.prod(sketch.dims(x)),))
        start = 0 if missing > 0 else int(sketch.choose.rng.integers(1 - missing))
        x = sketch.call("slice", x, (slice(start, start + (1 if missing > 0 else spec.size)),))
    if missing > 0:  # all of it times one of them
        x = sketch.call("pointwise", "mul", sketch.input(spec.dims, spec.dtype), x)
    if sketch.dims(x) != spec.dims:
        x = sketch.call("reshape", x, spec.dims)
    return x if sketch.dtype(x) is spec.dtype else sketch.call("astype", x, str(spec.dtype))


def _as_large(sketch: Sketch, spec: TensorSpec) -> Of:
    """A tensor with these dims and this dtype."""
    x = sketch.input(spec.dims, spec.dtype)
    return sketch.call("pointwise", "neg", x)


def _with_known(case: OperationCase, values: Arrays, name: str, known: np.ndarray) -> Arrays:
    """The values if one input is known: others may follow from it, but it must not follow from them."""
    found = arrays(case, {name: known})
    changed = {n for n in found if not np.array_equal(exact(found[n]), exact(values[n]), equal_nan=True)}
    if changed != {name} and not np.array_equal(exact(found[name]), exact(known), equal_nan=True):
        raise Refused
    return found


# Gradients.


def gradient(sketch: Sketch) -> None:
    """The gradients of one or two results, by inputs and sometimes by results on the way."""
    choose = sketch.choose
    floats = [n for n, values in enumerate(sketch.values) if sketch.dtype(Of(n)).is_floating and values.size]
    results = [number for number in floats if number not in sketch.inputs]
    if not results:
        raise Refused
    chosen = {
        results[-1] if choose.chance(0.5) else choose.one(results) for _ in range(choose.one((1, 1, 2)))
    }
    outputs = tuple(map(Of, sorted(chosen)))
    wrt = tuple(Of(n) for n in floats if choose.chance(0.6 if n in sketch.inputs else 0.1))
    upstream = tuple(sketch.input(sketch.dims(of), sketch.dtype(of)) for of in outputs)
    sketch.gradients(outputs, wrt or (Of(choose.one(floats)),), upstream)


# The builder's functions, by their signatures.


def function(sketch: Sketch) -> None:
    """One of the builder's functions."""
    name = sketch.choose.one(FUNCTION_NAMES)
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    x: Of | None = None
    for parameter in parameters_of(name):
        required = parameter.default is parameter.empty
        if not required and sketch.choose.chance(0.5):
            continue
        value = argument_of(parameter)(sketch, x)
        x = value if x is None and isinstance(value, Of) else x
        if required:
            arguments.append(value)
        else:
            keywords[parameter.name] = value
    sketch.call(name, *arguments, **keywords)


@functools.cache
def parameters_of(name: str) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function of the builder."""
    _, *parameters = inspect.signature(getattr(GraphBuilder, name)).parameters.values()
    return tuple(parameters)


def argument_of(parameter: inspect.Parameter) -> Callable[[Sketch, Of | None], Any]:
    """What draws an argument, also from the first tensor. Raises `KeyError` if nothing does."""
    annotation = str(parameter.annotation)
    known = (f"{parameter.name}: {annotation}", f"{parameter.name}:", annotation)
    return ARGUMENTS[next(key for key in (*known, annotation) if key in ARGUMENTS or key == known[-1])]


def _operand(sketch: Sketch, x: Of | None) -> Any:
    return sketch.some() if x is None else _partner(sketch, x)


def _new(dims: Callable[[Sketch, Dims], Dims]) -> Callable[[Sketch, Of | None], Of]:
    """A new input of dims that follow from the first tensor's."""

    def new(sketch: Sketch, x: Of | None) -> Of:
        if x is None:
            raise Refused
        return sketch.input(dims(sketch, sketch.dims(x)), sketch.dtype(x))

    return new


def _grid(dims: Dims) -> Dims:
    """Of a grid of places in a tensor of these dims."""
    if len(dims) < 3:
        raise Refused
    return dims[0], *dims[:1:-1], len(dims) - 2


def _state(sketch: Sketch, x: Of | None) -> Of:
    """Of random numbers."""
    del x
    return sketch.input((2,), DType.INT64, sketch.choose.rng.integers(1 << 40, size=2))


def _indices(sketch: Sketch, x: Of | None) -> Of:
    """Of elements of the first tensor: with dims like its own, or others."""
    dims = () if x is None else sketch.dims(x)
    if sketch.choose.chance(0.5):
        dims = tuple(sketch.choose.size(3) for _ in range(sketch.choose.one((0, 1, 2))))
    return sketch.input(dims, DType.INT64, sketch.choose.rng.integers(-9, 9, dims))


def _sizes(sketch: Sketch, x: Of | None) -> Dims:
    """Of the first tensor, changed."""
    return tuple(sketch.choose.size(5) for _ in (() if x is None else sketch.dims(x)))


def _dtype(sketch: Sketch, x: Of | None) -> str:
    del x
    return str(sketch.choose.one((*FLOATS, DType.BOOL, DType.INT64, DType.INT8)))


def _axis(sketch: Sketch, x: Of | None) -> int:
    rank = 1 if x is None else len(sketch.dims(x))
    return int(sketch.choose.rng.integers(-rank, max(rank, 1)))


def _axes(sketch: Sketch, x: Of | None) -> Any:
    rank = 1 if x is None else len(sketch.dims(x))
    some = tuple(axis for axis in range(rank) if sketch.choose.chance(0.5))
    return sketch.choose.one((None, _axis(sketch, x), some))


_WITH_DERIVATIVES = [mode for mode in GRADIENTS if FUNCTIONS[mode].arity == 1]
ARGUMENTS: dict[str, Callable[[Sketch, Of | None], Any]] = {
    "Tensor": _operand,
    "Any": _operand,
    "int": _axis,
    "Axes": _axes,
    "bool": lambda sketch, _: sketch.choose.chance(0.5),
    "float": lambda sketch, _: sketch.choose.one((1e-5, 1e-3)),
    "float | None": lambda sketch, _: sketch.choose.size(12) / 4,
    "Tensor | None": lambda sketch, _: None,
    "ReductionMode": lambda sketch, _: sketch.choose.one(ReductionMode),
    "int | Sequence[int]": lambda sketch, _: sketch.choose.one((1, 2, 2, 3)),
    "int | Sequence[int] | None": lambda sketch, _: sketch.choose.one((1, 2)),
    "Sequence[int]": lambda sketch, _: sketch.some_dims(),
    "DTypeLike": _dtype,
    "tuple[int | None, int | None] | None": (
        lambda sketch, _: sketch.choose.one(((2, 0), (None, 1), (1, None), None))
    ),
    "bool | Sequence[float]": lambda sketch, _: sketch.choose.chance(0.5),
    "Causal": lambda sketch, _: sketch.choose.one((False, True, "bottom_right")),
    "sinks:": _new(lambda _, dims: dims[1:2]),
    "score:": lambda sketch, _: None,
    "state: Tensor": _state,
    "indices: Tensor": _indices,
    "axis: int | None": lambda sketch, x: sketch.choose.one((None, _axis(sketch, x))),
    "ScatterReduction": lambda sketch, _: sketch.choose.one(ScatterReduction),
    "k: int": lambda sketch, _: sketch.choose.size(3),
    "sizes: Sequence[int] | None": _sizes,
    **dict.fromkeys(("scales:", "axes: Sequence[int] | None", "roi:"), lambda sketch, _: None),
    "ResampleMode": lambda sketch, _: sketch.choose.one(ResampleMode),
    "Coordinates": lambda sketch, _: sketch.choose.one(Coordinates),
    "NearestRounding": lambda sketch, _: sketch.choose.one(NearestRounding),
    "GridPadding": lambda sketch, _: sketch.choose.one(GridPadding),
    "grid: Tensor": _new(lambda _, dims: _grid(dims)),
    "batch_dims:": lambda sketch, _: sketch.choose.one((0, 0, 1)),
    "probability:": lambda sketch, _: sketch.choose.one((0.25, 0.5, 0.75)),
    "dropout:": lambda sketch, _: 0.0,
    "compute_dtype:": lambda sketch, _: sketch.choose.one((None, None, "float64")),
    "means:": lambda sketch, x: None if sketch.choose.chance(0.5) else _new(lambda _, dims: dims)(sketch, x),
    "low: int": lambda sketch, _: -sketch.choose.size(5),
    "high: int": lambda sketch, _: sketch.choose.size(5),
    "low: float": lambda sketch, _: -sketch.choose.size(5) / 4,
    "high: float": lambda sketch, _: sketch.choose.size(5) / 4,
    "p:": lambda sketch, _: sketch.choose.one((1.0, 2.0, 3.0)),
    "groups:": lambda sketch, _: sketch.choose.one((1, 1, 2)),
    "mode: str": lambda sketch, _: str(sketch.choose.one(_WITH_DERIVATIVES)),
    "beta: float": lambda sketch, _: sketch.choose.one((0.5, 0.75)),
    "bias: float": lambda sketch, _: sketch.choose.one((0.5, 1.0)),
    "size: int": lambda sketch, _: sketch.choose.size(4),
    "pad:": lambda sketch, _: sketch.choose.one((0, 1)),
    "dilation:": lambda sketch, _: 1,
    "lower:": lambda sketch, _: -sketch.choose.size(12) / 4,
    "scale: Tensor | None": _new(lambda sketch, dims: dims[-1:]),
    "b: Tensor": _new(lambda sketch, dims: (*dims[-1:], sketch.choose.one(SIZES))),
    "k: Tensor": _new(lambda sketch, dims: dims),
    "v: Tensor": _new(lambda sketch, dims: dims),
}
"""How an argument is drawn: by its name and annotation, by its name, or by its annotation."""

OF_OTHER_MOVES = frozenset(
    {"conv", "unfold", "fold", "affine_grid", "max_pool_backward", "avg_pool_backward"}
)
"""Functions whose operands have to fit each other."""
COMPOSED = frozenset({"multi_head_attention", "attention_weights"})
"""Compositions of functions that are drawn, with operands by name."""
FUNCTION_NAMES = tuple(
    name
    for kind in (
        Functions,
        IndexingFunctions,
        NetworkFunctions,
        AttentionFunctions,
        RandomFunctions,
        SpatialFunctions,
        BackwardFunctions,
    )
    for name, member in vars(kind).items()
    if callable(member) and not name.startswith("_") and name not in OF_OTHER_MOVES | COMPOSED
)
"""The functions that are drawn by their signatures."""

MOVES: tuple[tuple[Callable[[Sketch], None], int], ...] = (
    (pointwise, 3),
    (function, 4),
    (operation, 5),
    (convolution, 2),
    (transpose, 1),
    (reshape, 1),
    (cut, 1),
    (arrangement, 1),
    (astype, 1),
)
"""The moves, and how often each is drawn."""
