"""Operators that move, pick or put elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..draw import Draw
from ..versions import Version
from .parts import Hint, Parts, scalar

__all__ = ["SHAPES"]


def _data(d: Draw, v: Version, dims: tuple[int, ...] | None = None, least: int = 1) -> np.ndarray:
    dims = d.dims(least=least) if dims is None else dims
    return d.array(d.dtype(v.schema, v.schema.inputs[0].type_str), dims)


def _index_dtype(d: Draw, v: Version, number: int) -> np.dtype[Any]:
    return d.dtype(v.schema, v.schema.inputs[number].type_str)


def _given(v: Version, name: str, value: Any, number: int, inputs: list[Any]) -> dict[str, Any]:
    """What is an attribute in old versions and an input in new ones."""
    if v.has(name):
        return {name: None if value is None else [int(each) for each in value]}
    while len(inputs) < number:
        inputs.append(None)
    inputs.append(None if value is None else np.array(value, np.int64))
    return {}


def reduction(d: Draw, v: Version) -> Parts:
    inputs = [_data(d, v, least=0)]
    axes = d.axes(inputs[0].ndim) if d.random() < 0.75 else None
    if axes == [] and v.has("axes"):
        axes = None
    return Parts(inputs, _given(v, "axes", axes, 1, inputs))


def squeeze(d: Draw, v: Version) -> Parts:
    x = _data(d, v, tuple(d.choice((1, 1, 2, 3, 0 if d.seldom(0.1) else 2)) for _ in range(d.randint(0, 4))))
    ones = [axis for axis, dim in enumerate(x.shape) if dim == 1]
    axes = [axis - d.choice((0, x.ndim)) for axis in d.sample(ones, d.randint(0, len(ones)))]
    inputs: list[Any] = [x]
    return Parts(inputs, _given(v, "axes", axes if d.random() < 0.8 else None, 1, inputs))


def unsqueeze(d: Draw, v: Version) -> Parts:
    x = _data(d, v, least=0)
    count = d.choice((0, 1, 1, 2))
    rank = x.ndim + count
    axes = d.sample(range(rank), count)
    if v.since >= 11:
        axes = [axis - d.choice((0, rank)) for axis in axes]
    if d.seldom(0.03):
        axes.append(d.choice((0, rank, -rank - 1)))
    inputs: list[Any] = [x]
    return Parts(inputs, _given(v, "axes", axes, 1, inputs))


def slicing(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    axes = d.axes(x.ndim, least=1)
    far = (2**31 - 1, 2**63 - 1, -(2**31), -(2**63) + 1)
    starts, ends = ([d.choice(far) if d.seldom(0.1) else d.randint(-7, 7) for _ in axes] for _ in range(2))
    steps = [d.choice((1, 1, 2, 3, -1, -2, -3)) for _ in axes]
    if v.since < 10:
        given = axes if d.random() < 0.7 else None
        if given is None:
            starts, ends = starts[: x.ndim], ends[: x.ndim]
        return Parts([x], {"starts": starts, "ends": ends, "axes": given})
    t = d.choice((np.int64, np.int64, np.int32))
    wide = np.iinfo(t)
    starts, ends = (np.clip(each, wide.min, wide.max) for each in (starts, ends))  # type: ignore[assignment]
    needed = frozenset({3} if len(axes) != x.ndim else ())
    return Parts([x, *(np.array(each, t) for each in (starts, ends, axes, steps))], needed=needed)


def gather(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    axis = d.randrange(x.ndim)
    size = x.shape[axis]
    low = -size if v.since >= 11 else 0
    dims = d.dims(d.choice((0, 1, 1, 2, 3))) if size else (*d.dims(d.choice((0, 1))), 0)
    return Parts([x, d.whole(low, size, dims, _index_dtype(d, v, 1))], {"axis": axis - d.choice((0, x.ndim))})


def gather_elements(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    axis = d.randrange(x.ndim)
    dims = [d.randint(0 if d.seldom() else 1, dim) if dim else 0 for dim in x.shape]
    dims[axis] = d.size() if x.shape[axis] else 0
    indices = d.whole(-x.shape[axis], x.shape[axis], dims, _index_dtype(d, v, 1))
    return Parts([x, indices], {"axis": axis - d.choice((0, x.ndim))})


def scatter_elements(d: Draw, v: Version) -> Parts:
    parts = gather_elements(d, v)
    x, indices = parts.inputs
    axis = parts.attributes["axis"]
    reduction = d.choice((None, "add", "mul", "min", "max") if v.since >= 18 else (None, "add", "mul"))
    if v.has("reduction") and reduction:
        return Parts([x, indices, d.array(x.dtype, indices.shape)], {"axis": axis, "reduction": reduction})
    kept = min(indices.shape[axis], x.shape[axis])  # each place once, or what is written last would decide
    indices = np.moveaxis(np.moveaxis(indices, axis, 0)[:kept], 0, axis)
    if indices.size:
        places = d.arrays.permutation(x.shape[axis])[:kept].reshape(
            [-1 if n == axis % x.ndim else 1 for n in range(x.ndim)]
        )
        indices = (np.broadcast_to(places, indices.shape) - d.choice((0, x.shape[axis]))).astype(
            indices.dtype
        )
    return Parts([x, indices, d.array(x.dtype, indices.shape)], {"axis": axis, "reduction": None})


def gather_nd(d: Draw, v: Version) -> Parts:
    x = _data(d, v, d.dims(d.randint(1, 4), empty=False))
    batch = d.randrange(x.ndim) if v.has("batch_dims") and d.random() < 0.3 else 0
    depth = d.randint(1, x.ndim - batch)
    dims = (*x.shape[:batch], *d.dims(d.choice((0, 1, 1, 2))))
    each = [d.whole(-x.shape[batch + n], x.shape[batch + n], dims) for n in range(depth)]
    return Parts([x, np.stack(each, -1)], {"batch_dims": batch or None})


def scatter_nd(d: Draw, v: Version) -> Parts:
    x = _data(d, v, d.dims(d.randint(1, 4), empty=False))
    depth = d.randint(1, x.ndim)
    reduction = d.choice((None, "add", "mul", "min", "max") if v.since >= 18 else (None, "add", "mul"))
    count = int(np.prod(x.shape[:depth]))
    kept = d.randint(0 if d.seldom() else 1, count)
    if v.has("reduction") and reduction:
        places = d.whole(0, count, (kept,))
    else:
        places, reduction = d.arrays.permutation(count)[:kept], None
    indices = np.stack(np.unravel_index(places, x.shape[:depth]), -1).astype(np.int64).reshape(-1, depth)
    if d.random() < 0.3:
        indices -= np.array(x.shape[:depth])
    return Parts([x, indices, d.array(x.dtype, (len(indices), *x.shape[depth:]))], {"reduction": reduction})


def compress(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    axis = d.axis(x.ndim) if d.random() < 0.7 else None
    size = x.size if axis is None or not -x.ndim <= axis < x.ndim else x.shape[axis]
    return Parts([x, d.array(np.bool_, (d.randint(0, size) if d.random() < 0.3 else size,))], {"axis": axis})


def concat(d: Draw, v: Version) -> Parts:
    base = list(d.dims(least=1))
    axis, rank = d.axis(len(base)), len(base)
    t = d.dtype(v.schema, v.schema.inputs[0].type_str)
    found = []
    for _ in range(d.randint(1, 4)):
        if -rank <= axis < rank:
            base[axis] = d.size()
        found.append(d.array(t, base))
    default = v.since == 1 and axis == 1 and d.random() < 0.3
    return Parts(found, {"axis": None if default else axis})


def split(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    axis = d.randrange(x.ndim)
    size, outputs = x.shape[axis], d.randint(1, 4)
    attributes = {"axis": axis - d.choice((0, x.ndim)) if v.since > 1 else axis}
    cuts = sorted(d.randint(0, size) for _ in range(outputs - 1))
    parts = np.diff([0, *cuts, size]).tolist()
    if d.seldom(0.03):
        parts[0] += 1
    inputs: list[Any] = [x]
    if d.random() < 0.6:
        attributes |= _given(v, "split", parts, 1, inputs)
        return Parts(inputs, attributes | {"num_outputs": None}, needed=frozenset({1}), outputs=outputs)
    return Parts(inputs, attributes | {"split": None, "num_outputs": outputs}, outputs=outputs)


def reshape(d: Draw, v: Version) -> Parts:
    x = _data(d, v, least=0)
    if x.size:
        left, dims = x.size, list[int]()
        while left > 1 and len(dims) < 4:
            dim = d.choice([each for each in range(1, left + 1) if left % each == 0])
            dims.append(dim)
            left //= dim
        dims += [left] if left > 1 else []
        dims += [1] * d.choice((0, 0, 1))
    else:
        dims = list(d.sample(x.shape, x.ndim))
    allow = 1 if v.has("allowzero") and d.random() < 0.3 else None
    if dims and d.random() < 0.4 and (x.size or d.random() < 0.3):
        dims[d.randrange(len(dims))] = -1
    elif dims and not allow:
        for n, dim in enumerate(dims):
            if n < x.ndim and x.shape[n] == dim and d.random() < 0.3:
                dims[n] = 0
    inputs: list[Any] = [x]
    attributes = _given(v, "shape", dims, 1, inputs)
    return Parts(inputs, attributes | {"allowzero": allow})


def expand(d: Draw, v: Version) -> Parts:
    shape = d.dims()
    return Parts([_data(d, v, d.broadcast(shape)), np.array(d.broadcast(shape), np.int64)])


def tile(d: Draw, v: Version) -> Parts:
    x = _data(d, v, least=0)
    if v.since == 1:
        return Parts([x, np.array(2, x.dtype), np.array(0, x.dtype)])
    return Parts([x, np.array([d.choice((0 if d.seldom() else 1, 1, 2, 3)) for _ in x.shape], np.int64)])


def pad(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    mode = d.choice((None, "constant", "edge", "reflect", *(("wrap",) if v.since >= 19 else ())))
    axes = d.axes(x.ndim, least=1) if v.since >= 18 and d.random() < 0.4 else None
    count = x.ndim if axes is None else len(axes)
    low = -1 if d.random() < 0.2 else 0
    pads = d.sizes(2 * count, low, 2)
    if v.since < 11:
        return Parts([x], {"pads": pads, "paddings": pads, "mode": mode, "value": d.choice((None, 1.5))})
    t = _index_dtype(d, v, 3) if v.since >= 18 else np.int64
    inputs = [x, np.array(pads, np.int64), d.array(x.dtype, ()), None if axes is None else np.array(axes, t)]
    return Parts(
        inputs[: len(v.schema.inputs)], {"mode": mode}, needed=frozenset({3} if axes is not None else ())
    )


def center_crop_pad(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    axes = d.axes(x.ndim, least=1) if d.random() < 0.5 else None
    count = x.ndim if axes is None else len(axes)
    return Parts([x, np.array(d.sizes(count, 1, 6), _index_dtype(d, v, 1))], {"axes": axes})


def depth_to_space(d: Draw, v: Version) -> Parts:
    by, batch, channels = d.randint(1, 3), d.randint(1, 2), d.randint(1, 2)
    dims = (batch, channels, *d.sizes(2, 1, 3))
    if v.operator == "DepthToSpace":
        dims = (dims[0], dims[1] * by * by, *dims[2:])
    else:
        dims = (*dims[:2], dims[2] * by, dims[3] * by)
    return Parts([_data(d, v, dims)], {"blocksize": by})


def reverse_sequence(d: Draw, v: Version) -> Parts:
    x, batch = _data(d, v, d.dims(d.randint(2, 4), empty=False)), d.randint(0, 1)
    lengths = d.whole(0 if d.seldom() else 1, x.shape[1 - batch] + 1, (x.shape[batch],))
    return Parts([x, lengths], {"batch_axis": batch, "time_axis": 1 - batch})


def top_k(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    axis = d.axis(x.ndim)
    size = x.shape[axis] if -x.ndim <= axis < x.ndim else 1
    k = d.randint(0 if d.seldom(0.1) else min(1, size), size)
    attributes = {"axis": axis, "k": k, "sorted": None}
    return Parts([x, np.array([k])][: len(v.schema.inputs)], attributes)


def unique(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    return Parts([x], {"axis": d.axis(x.ndim) if d.random() < 0.5 else None})


def one_hot(d: Draw, v: Version) -> Parts:
    t1, t2, t3 = (d.dtype(v.schema, each.type_str) for each in v.schema.inputs)
    depth = d.randint(1, 4)
    indices = d.whole(
        -depth if t1.kind != "u" and v.since > 9 else 0, depth + int(d.seldom(0.2)), d.dims()
    ).astype(t1)
    rank = indices.ndim + 1
    axis = d.axis(rank) if d.random() < 0.6 else None
    return Parts([indices, scalar(d, depth, t2), d.array(t3, (2,))], {"axis": axis})


def trilu(d: Draw, v: Version) -> Parts:
    return Parts([_data(d, v, least=2), np.array(d.randint(-6, 6))])


def cumulative(d: Draw, v: Version) -> Parts:
    x = _data(d, v)
    return Parts([x, scalar(d, d.axis(x.ndim), _index_dtype(d, v, 1))])


def where(d: Draw, v: Version) -> Parts:
    base = d.dims()
    t = d.dtype(v.schema, v.schema.inputs[1].type_str)
    return Parts(
        [d.array(np.bool_, d.broadcast(base)), d.array(t, d.broadcast(base)), d.array(t, d.broadcast(base))]
    )


def tensor_scatter(d: Draw, v: Version) -> Parts:
    cache = _data(d, v, d.dims(d.randint(2, 4), empty=False))
    axis = d.randint(1, cache.ndim - 1)
    dims = list(cache.shape)
    dims[axis] = d.randint(1, dims[axis])
    most = cache.shape[axis] - dims[axis] + 1
    return Parts(
        [cache, d.array(cache.dtype, dims), d.whole(0, most, (dims[0],))],
        {"axis": axis - d.choice((0, cache.ndim))},
    )


def transpose(d: Draw, v: Version) -> Parts:
    return Parts([_data(d, v, least=0)])


def eye_like(d: Draw, v: Version) -> Parts:
    return Parts([_data(d, v, d.dims(2 if not d.seldom() else 3))], {"k": d.choice((None, -1, 0, 1, 3, -5))})


def array_feature_extractor(d: Draw, v: Version) -> Parts:
    x = _data(d, v, d.dims(d.randint(1, 3), empty=False))
    return Parts(
        [x, d.whole(0, x.shape[-1], (1, d.randint(1, 3)) if d.random() < 0.5 else (d.randint(1, 3),))]
    )


def flatten(d: Draw, v: Version) -> Parts:
    x = _data(d, v, least=0)
    low = -x.ndim if v.since >= 11 else 0
    return Parts(
        [x],
        {"axis": d.choice((None, d.randint(low, x.ndim)))} if not d.seldom(0.03) else {"axis": x.ndim + 1},
    )


def shape(d: Draw, v: Version) -> Parts:
    return Parts(
        [_data(d, v, least=0)], {name: d.choice((None, d.randint(-5, 5))) for name in ("start", "end")}
    )


REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
SHAPES: dict[str, Hint] = {
    **{f"Reduce{name}": reduction for name in REDUCTIONS},
    "ArrayFeatureExtractor": array_feature_extractor,
    "CenterCropPad": center_crop_pad,
    "Compress": compress,
    "Concat": concat,
    "CumProd": cumulative,
    "CumSum": cumulative,
    "DepthToSpace": depth_to_space,
    "Expand": expand,
    "EyeLike": eye_like,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "OneHot": one_hot,
    "Pad": pad,
    "Reshape": reshape,
    "ReverseSequence": reverse_sequence,
    "Scatter": scatter_elements,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "Shape": shape,
    "Slice": slicing,
    "SpaceToDepth": depth_to_space,
    "Split": split,
    "Squeeze": squeeze,
    "TensorScatter": tensor_scatter,
    "Tile": tile,
    "TopK": top_k,
    "Transpose": transpose,
    "Trilu": trilu,
    "Unique": unique,
    "Unsqueeze": unsqueeze,
    "Where": where,
}
